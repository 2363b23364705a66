package dagster_unified;

import java.io.IOException;
import java.util.ArrayList;
import java.util.concurrent.ConcurrentHashMap;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;

import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.SQLContext;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.plans.logical.LocalRelation;
import org.apache.spark.sql.catalyst.types.DataTypeUtils;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.streaming.Offset;
import org.apache.spark.sql.execution.streaming.Source;
import org.apache.spark.sql.execution.streaming.runtime.SerializedOffset;
import org.apache.spark.sql.sources.StreamSourceProvider;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

import scala.None$;
import scala.Option;
import scala.Some;
import scala.Tuple2;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The control stream of `control.py`, in the JVM of a driver that writes the events.
 *
 * Its rows are made in the driver, of Spark's own classes, so that executors need nothing.
 */
public class ControlStream implements StreamSourceProvider {
    private static final StructType SCHEMA = new StructType().add("event", DataTypes.StringType);
    private static final ObjectMapper JSON = new ObjectMapper();

    /** The local property that has the event of a micro-batch; `CONTROL` in `engine/worker.py`. */
    private static final String CONTROL = "dagster_unified.control";

    /** The latest offset of each control file, by its folder. */
    private static final ConcurrentHashMap LATEST = new ConcurrentHashMap();

    /** Make `offset`, which has an event, the latest of a folder's control file. */
    public static void publish(String folder, String offset) {
        LATEST.put(folder, offset);
    }

    public Tuple2 sourceSchema(
            SQLContext context, Option schema, String provider, scala.collection.immutable.Map options) {
        return new Tuple2(provider, SCHEMA);
    }

    public Source createSource(
            SQLContext context, String log, Option schema, String provider, scala.collection.immutable.Map options) {
        return new Events((SparkSession) context.sparkSession(), (String) options.apply("path"));
    }

    /** The events of one control file. */
    private static class Events implements Source {
        private final SparkSession session;
        private final String folder;

        Events(SparkSession session, String folder) {
            this.session = session;
            this.folder = folder;
        }

        public StructType schema() {
            return SCHEMA;
        }

        public Option getOffset() {
            String latest = (String) LATEST.get(folder);
            if (session.sparkContext().getLocalProperty(CONTROL) == null) {
                tell(latest); // after a restart, until a micro-batch has an event
            }
            return new Some(new SerializedOffset(latest));
        }

        /** Tell the tasks of the micro-batches from now on which event theirs had, or the one before it. */
        private void tell(String offset) {
            try {
                JsonNode event = JSON.readTree(offset).get("event");
                if (event != null) {
                    session.sparkContext().setLocalProperty(CONTROL, event.asText());
                }
            } catch (IOException error) {
                throw new IllegalStateException("an offset of the control stream is no JSON: " + offset, error);
            }
        }

        public Dataset getBatch(Option start, Offset end) {
            ArrayList rows = new ArrayList();
            tell(end.json());
            try {
                JsonNode last = JSON.readTree(end.json());
                long before = start.isEmpty() ? 0 : JSON.readTree(((Offset) start.get()).json()).get("number").asLong();
                if (last.get("number").asLong() > before) {
                    rows.add(new GenericInternalRow(new Object[] {UTF8String.fromString(last.get("event").asText())}));
                }
            } catch (IOException error) {
                throw new IllegalStateException("an offset of the control stream is no JSON: " + end.json(), error);
            }
            return org.apache.spark.sql.classic.Dataset.ofRows(
                    session,
                    new LocalRelation(
                            DataTypeUtils.toAttributes(SCHEMA),
                            CollectionConverters.asScala(rows).toSeq(),
                            true,
                            None$.MODULE$));
        }

        public void stop() {}
    }
}
