package dagster_unified;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.UUID;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

/** Writes each file of Spark's checkpoints as one object, which is there once it is whole, or never. */
public class BucketFiles extends FileSystemBasedCheckpointFileManager {
    public BucketFiles(Path path, Configuration configuration) {
        super(path, configuration);
    }

    public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrite)
            throws IOException {
        FSDataOutputStreamBuilder builder = fs().createFile(path).recursive().overwrite(overwrite);
        if (overwrite) {
            builder.must("fs.s3a.create.performance", true);
            return new Whole((FSDataOutputStream) builder.build(), null, path, null);
        }
        String writer = UUID.randomUUID().toString();
        builder.must("fs.option.create.conditional.overwrite", true);
        builder.must("fs.s3a.create.header.writer", writer);
        return new Whole((FSDataOutputStream) builder.build(), fs(), path, writer);
    }

    public static class Whole extends CheckpointFileManager.CancellableFSDataOutputStream {
        private final FileSystem files;
        private final Path path;
        private final String writer;
        private boolean ended = false;

        /** With a `writer` the store refuses an object that is there before. */
        public Whole(FSDataOutputStream object, FileSystem files, Path path, String writer) {
            super(object);
            this.files = files;
            this.path = path;
            this.writer = writer;
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
            FSDataOutputStream object = (FSDataOutputStream) underlyingStream();
            object.abort();
            try {
                object.close();
            } catch (IOException error) {
                // what was aborted has nothing to write
            }
        }
    }
}
