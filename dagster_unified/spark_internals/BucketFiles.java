package dagster_unified;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.FileNotFoundException;
import java.io.FilterOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.UUID;
import java.util.regex.Pattern;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FutureDataInputStreamBuilder;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.PathFilter;
import org.apache.hadoop.fs.PositionedReadable;
import org.apache.hadoop.fs.Seekable;
import org.apache.hadoop.util.functional.FutureIO;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

/**
 * Writes each file of Spark's checkpoints as one object, which is there once it is whole, or never.
 *
 * Spark reads what it has just logged of a source, and looks several times at a chunk's log, which never changes. What
 * has been written or listed is not asked for again: each question is a request.
 */
public class BucketFiles extends FileSystemBasedCheckpointFileManager {
    private static final Pattern CHUNK_LOG = Pattern.compile(".*/chunks/[0-9]{10}-[0-9a-f]{6}/_spark_metadata");

    /** Of folders that hold files only, so that what is no file is not there. */
    private static final Pattern LOG = Pattern.compile(".*/(offsets|commits|sources/[0-9]+)");

    private final Path root;
    private final boolean isLog;
    private final FileStatus[] entries;
    private final LastWritten last = new LastWritten();

    public BucketFiles(Path path, Configuration configuration) throws IOException {
        super(path, configuration);
        String name = path.toUri().getPath();
        root = path;
        isLog = LOG.matcher(name).matches();
        entries = CHUNK_LOG.matcher(name).matches() ? entries(path) : new FileStatus[0];
    }

    /** What the log of a chunk has, which is nothing if it is gone. */
    private FileStatus[] entries(Path path) throws IOException {
        try {
            return fs().listStatus(path);
        } catch (FileNotFoundException gone) {
            return new FileStatus[0];
        }
    }

    private FileStatus entry(Path path) {
        for (FileStatus entry : entries) {
            if (entry.getPath().equals(path)) {
                return entry;
            }
        }
        return null;
    }

    private boolean isListed(Path path) {
        return entries.length > 0 && path.equals(root);
    }

    public boolean exists(Path path) throws IOException {
        if (isListed(path) || entry(path) != null || last.content(path) != null) {
            return true;
        }
        return isLog && root.equals(path.getParent()) ? fs().isFile(path) : super.exists(path);
    }

    public FileStatus[] list(Path path, PathFilter filter) {
        if (!isListed(path)) {
            return super.list(path, filter);
        }
        ArrayList found = new ArrayList();
        for (FileStatus entry : entries) {
            if (filter.accept(entry.getPath())) {
                found.add(entry);
            }
        }
        return (FileStatus[]) found.toArray(new FileStatus[0]);
    }

    public FSDataInputStream open(Path path) throws IOException {
        byte[] content = last.content(path);
        if (content != null) {
            return new FSDataInputStream(new Bytes(content));
        }
        FileStatus entry = entry(path);
        if (entry == null) {
            return super.open(path);
        }
        FutureDataInputStreamBuilder builder = (FutureDataInputStreamBuilder) fs().openFile(path);
        return (FSDataInputStream) FutureIO.awaitFuture(builder.withFileStatus(entry).build());
    }

    public void delete(Path path) {
        last.forget(path);
        super.delete(path);
    }

    public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrite)
            throws IOException {
        FSDataOutputStreamBuilder builder = fs().createFile(path).recursive().overwrite(overwrite);
        last.forget(path);
        if (overwrite) {
            builder.must("fs.s3a.create.performance", true);
            return new Whole((FSDataOutputStream) builder.build(), null, path, null, null);
        }
        String writer = UUID.randomUUID().toString();
        builder.must("fs.option.create.conditional.overwrite", true);
        builder.must("fs.s3a.create.header.writer", writer);
        return new Whole((FSDataOutputStream) builder.build(), fs(), path, writer, last);
    }

    public static class Whole extends CheckpointFileManager.CancellableFSDataOutputStream {
        private final FSDataOutputStream object;
        private final FileSystem files;
        private final Path path;
        private final String writer;
        private final LastWritten last;
        private boolean ended = false;

        /** With a `writer` the store refuses an object that is there before. */
        public Whole(FSDataOutputStream object, FileSystem files, Path path, String writer, LastWritten last) {
            super(last == null ? object : new Copied(object));
            this.object = object;
            this.files = files;
            this.path = path;
            this.writer = writer;
            this.last = last;
        }

        public synchronized void close() throws IOException {
            if (ended) {
                return;
            }
            ended = true;
            try {
                super.close();
            } catch (IOException error) {
                if (writer == null) {
                    throw error;
                }
                judge(error);
            }
            if (last != null) {
                last.keep(path, ((Copied) underlyingStream()).content());
            }
        }

        /** The client asks again where an answer was lost, and is then refused what it has written itself. */
        private void judge(IOException error) throws IOException {
            byte[] found;
            try {
                found = files.getXAttr(path, "header.writer");
            } catch (IOException absent) {
                error.addSuppressed(absent);
                throw error;
            }
            if (found == null || !new String(found, StandardCharsets.UTF_8).equals(writer)) {
                IOException exists = new FileAlreadyExistsException(path + " was written by another query");
                exists.initCause(error);
                throw exists;
            }
        }

        /** Write nothing: of an object that was refused, the one that is there is another's. */
        public synchronized void cancel() {
            if (ended) {
                return;
            }
            ended = true;
            object.abort();
            try {
                object.close();
            } catch (IOException error) {
                // what was aborted has nothing to write
            }
        }
    }

    /** The last file that was written, if it is small: Spark reads what it has just logged. */
    public static class LastWritten {
        private Path path;
        private byte[] content;

        public synchronized void keep(Path path, byte[] content) {
            this.path = path;
            this.content = content;
        }

        public synchronized void forget(Path path) {
            if (path.equals(this.path)) {
                this.path = null;
                this.content = null;
            }
        }

        public synchronized byte[] content(Path path) {
            return path.equals(this.path) ? content : null;
        }
    }

    /** Keeps a copy of what is written, until that is much. */
    public static class Copied extends FilterOutputStream {
        private static final int MUCH = 1 << 16;

        private ByteArrayOutputStream copy = new ByteArrayOutputStream();

        public Copied(OutputStream object) {
            super(object);
        }

        public void write(int letter) throws IOException {
            out.write(letter);
            copy(new byte[] {(byte) letter}, 0, 1);
        }

        public void write(byte[] bytes, int from, int length) throws IOException {
            out.write(bytes, from, length);
            copy(bytes, from, length);
        }

        private void copy(byte[] bytes, int from, int length) {
            if (copy != null && copy.size() + length > MUCH) {
                copy = null;
            }
            if (copy != null) {
                copy.write(bytes, from, length);
            }
        }

        /** What was written, or null if it was much. */
        public byte[] content() {
            return copy == null ? null : copy.toByteArray();
        }
    }

    /** A file that is in memory. */
    public static class Bytes extends ByteArrayInputStream implements Seekable, PositionedReadable {
        public Bytes(byte[] content) {
            super(content);
        }

        public void seek(long position) throws IOException {
            if (position < 0 || position > count) {
                throw new EOFException("position " + position + " of " + count + " bytes");
            }
            pos = (int) position;
        }

        public long getPos() {
            return pos;
        }

        public boolean seekToNewSource(long position) {
            return false;
        }

        public int read(long position, byte[] into, int from, int length) {
            if (position >= count) {
                return -1;
            }
            int found = Math.min(length, count - (int) position);
            System.arraycopy(buf, (int) position, into, from, found);
            return found;
        }

        public void readFully(long position, byte[] into, int from, int length) throws IOException {
            if (position + length > count) {
                throw new EOFException("position " + (position + length) + " of " + count + " bytes");
            }
            read(position, into, from, length);
        }

        public void readFully(long position, byte[] into) throws IOException {
            readFully(position, into, 0, into.length);
        }
    }
}
