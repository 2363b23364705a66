package dagster_unified;

import java.io.IOException;

import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.mapreduce.JobContext;
import org.apache.hadoop.mapreduce.JobStatus;
import org.apache.hadoop.mapreduce.TaskAttemptContext;
import org.apache.hadoop.mapreduce.TaskAttemptID;
import org.apache.parquet.hadoop.ParquetOutputCommitter;

/**
 * Lets each attempt of a task write its files where they stay, in a folder of its own, and marks it where it commits.
 *
 * The files of a folder without a mark do not count. Nothing is renamed, which in an object store is to copy.
 */
public class InPlace extends ParquetOutputCommitter {
    private final Path output;
    private final Path work;

    public InPlace(Path output, TaskAttemptContext context) throws IOException {
        super(output, context);
        this.output = output;
        TaskAttemptID attempt = context.getTaskAttemptID();
        work = new Path(output, attempt.getTaskID().getId() + "-" + attempt.getId());
    }

    public Path getWorkPath() {
        return work;
    }

    public void setupJob(JobContext context) {
    }

    public void commitJob(JobContext context) {
    }

    public void cleanupJob(JobContext context) {
    }

    public void abortJob(JobContext context, JobStatus.State state) throws IOException {
        files(context).delete(output, true);
    }

    public void setupTask(TaskAttemptContext context) {
    }

    public boolean needsTaskCommit(TaskAttemptContext context) {
        return true;
    }

    public void commitTask(TaskAttemptContext context) throws IOException {
        FSDataOutputStreamBuilder builder = files(context).createFile(new Path(work, "_committed")).recursive();
        builder.overwrite(true);
        builder.opt("fs.s3a.create.performance", "true");
        ((FSDataOutputStream) builder.build()).close();
    }

    public void abortTask(TaskAttemptContext context) throws IOException {
        files(context).delete(work, true);
    }

    private FileSystem files(JobContext context) throws IOException {
        return output.getFileSystem(context.getConfiguration());
    }
}
