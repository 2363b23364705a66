// Runs small DataStream programs whose watermark moves in mid-stream on Apache Flink 2.3, and prints what each emits, in emission order.
//
// Compile and run it with the jars of `apache-flink==2.3.0` (PyPI), in pyflink/lib: Oracle BATCH|STREAMING RECORD|BUNDLE [program ...]
// (RECORD: a watermark after every record; BUNDLE: after every third one)
import java.time.Duration;
import java.util.*;
import java.util.function.Function;
import org.apache.flink.api.common.RuntimeExecutionMode;
import org.apache.flink.api.common.eventtime.*;
import org.apache.flink.api.common.functions.*;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.*;
import org.apache.flink.api.common.typeinfo.*;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.*;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.*;
import org.apache.flink.streaming.api.windowing.triggers.*;
import org.apache.flink.streaming.api.windowing.windows.*;
import org.apache.flink.util.Collector;
import org.apache.flink.util.OutputTag;

public class Oracle {
    static final TypeInformation<Tuple3<String, Integer, Long>> ROW = Types.TUPLE(Types.STRING, Types.INT, Types.LONG);
    static int every = 1;

    @SuppressWarnings("unchecked")
    static final Tuple3<String, Integer, Long>[] M = new Tuple3[] {
        Tuple3.of("a", 1, 1000L), Tuple3.of("b", 2, 2000L), Tuple3.of("a", 3, 4000L),
        Tuple3.of("a", 4, 3000L), Tuple3.of("b", 5, 7000L), Tuple3.of("a", 6, 9000L),
        Tuple3.of("b", 7, 4500L), Tuple3.of("a", 8, 2500L), Tuple3.of("b", 9, 11000L),
        Tuple3.of("a", 10, 16000L), Tuple3.of("b", 11, 8000L), Tuple3.of("a", 12, 12000L),
        Tuple3.of("a", 13, 21000L), Tuple3.of("b", 14, 15000L), Tuple3.of("b", 15, 24000L),
    };

    static String wm(long w) {
        return w == Long.MAX_VALUE ? "MAX" : w == Long.MIN_VALUE ? "MIN" : Long.toString(w);
    }

    /** A watermark two seconds behind the latest event time, after every `count` events. */
    static class Behind implements WatermarkStrategy<Tuple3<String, Integer, Long>> {
        final int count;
        Behind(int count) { this.count = count; }
        public WatermarkGenerator<Tuple3<String, Integer, Long>> createWatermarkGenerator(WatermarkGeneratorSupplier.Context c) {
            return new WatermarkGenerator<>() {
                long latest = Long.MIN_VALUE + 10_000;
                int seen = 0;
                public void onEvent(Tuple3<String, Integer, Long> e, long t, WatermarkOutput out) {
                    latest = Math.max(latest, t);
                    if (++seen % count == 0) out.emitWatermark(new Watermark(latest - 2000 - 1));
                }
                public void onPeriodicEmit(WatermarkOutput out) {}
            };
        }
    }

    static DataStream<Tuple3<String, Integer, Long>> src(StreamExecutionEnvironment env) {
        // A pause before each record, so that two inputs of one operator see records and watermarks in the order in which they were made.
        return env.fromData(ROW, M).map(r -> { Thread.sleep(30); return r; }).returns(ROW)
            .assignTimestampsAndWatermarks(new Behind(every).withTimestampAssigner((r, t) -> r.f2));
    }

    static KeyedStream<Tuple3<String, Integer, Long>, String> keyed(StreamExecutionEnvironment env) {
        return src(env).keyBy(r -> r.f0, Types.STRING);
    }

    static class Timers extends KeyedProcessFunction<String, Tuple3<String, Integer, Long>, String> {
        transient ValueState<Integer> n;
        public void open(OpenContext c) { n = getRuntimeContext().getState(new ValueStateDescriptor<>("n", Types.INT)); }
        public void processElement(Tuple3<String, Integer, Long> v, Context ctx, Collector<String> out) throws Exception {
            n.update((n.value() == null ? 0 : n.value()) + 1);
            ctx.timerService().registerEventTimeTimer(v.f2 + 3000);
            out.collect("element key=" + v.f0 + " v=" + v.f1 + " n=" + n.value() + " wm=" + wm(ctx.timerService().currentWatermark()));
        }
        public void onTimer(long t, OnTimerContext ctx, Collector<String> out) throws Exception {
            out.collect("timer key=" + ctx.getCurrentKey() + " at=" + t + " n=" + n.value() + " wm=" + wm(ctx.timerService().currentWatermark()));
        }
    }

    static class Dump<W extends Window> extends ProcessWindowFunction<Tuple3<String, Integer, Long>, String, String, W> {
        public void process(String key, Context c, Iterable<Tuple3<String, Integer, Long>> elements, Collector<String> out) {
            List<Integer> values = new ArrayList<>();
            elements.forEach(e -> values.add(e.f1));
            String span = c.window() instanceof TimeWindow w ? "[" + w.getStart() + "," + w.getEnd() + ")" : "global";
            out.collect("key=" + key + " " + span + " " + values);
        }
    }

    static class Sum implements ReduceFunction<Tuple3<String, Integer, Long>> {
        public Tuple3<String, Integer, Long> reduce(Tuple3<String, Integer, Long> x, Tuple3<String, Integer, Long> y) {
            return Tuple3.of(x.f0, x.f1 + y.f1, Math.max(x.f2, y.f2));
        }
    }

    /** Flink's first example of keyed state: the average of every two values of a key. */
    static class CountWindowAverage extends RichFlatMapFunction<Tuple3<String, Integer, Long>, String> {
        transient ValueState<Tuple2<Long, Long>> sum;
        public void open(OpenContext c) {
            sum = getRuntimeContext().getState(new ValueStateDescriptor<>("average", Types.TUPLE(Types.LONG, Types.LONG)));
        }
        public void flatMap(Tuple3<String, Integer, Long> v, Collector<String> out) throws Exception {
            Tuple2<Long, Long> s = sum.value() == null ? Tuple2.of(0L, 0L) : sum.value();
            s = Tuple2.of(s.f0 + 1, s.f1 + v.f1);
            if (s.f0 >= 2) { out.collect("key=" + v.f0 + " " + s.f1 / s.f0); sum.clear(); } else sum.update(s);
        }
    }

    static final OutputTag<Tuple3<String, Integer, Long>> LATE = new OutputTag<>("late", ROW);

    static WindowedStream<Tuple3<String, Integer, Long>, String, TimeWindow> fiveSeconds(StreamExecutionEnvironment env) {
        return keyed(env).window(TumblingEventTimeWindows.of(Duration.ofSeconds(5)));
    }

    static final Map<String, Function<StreamExecutionEnvironment, DataStream<?>>> PROGRAMS = new LinkedHashMap<>();
    static {
        PROGRAMS.put("timers_in_mid_stream", env -> keyed(env).process(new Timers()));
        PROGRAMS.put("timers_behind_a_reduce", env -> keyed(env).reduce(new Sum()).keyBy(r -> r.f0, Types.STRING).process(new Timers()));
        PROGRAMS.put("tumbling_in_mid_stream", env -> fiveSeconds(env).process(new Dump<>()));
        PROGRAMS.put("tumbling_late_side_output", env -> {
            SingleOutputStreamOperator<String> main = fiveSeconds(env).sideOutputLateData(LATE).process(new Dump<>());
            return main.getSideOutput(LATE).map(r -> "late key=" + r.f0 + " " + r.f1).returns(Types.STRING).union(main);
        });
        PROGRAMS.put("tumbling_allowed_lateness", env -> {
            SingleOutputStreamOperator<String> main = fiveSeconds(env).allowedLateness(Duration.ofSeconds(3)).sideOutputLateData(LATE).process(new Dump<>());
            return main.getSideOutput(LATE).map(r -> "late key=" + r.f0 + " " + r.f1).returns(Types.STRING).union(main);
        });
        PROGRAMS.put("session_in_mid_stream", env -> keyed(env).window(EventTimeSessionWindows.withGap(Duration.ofSeconds(3))).process(new Dump<>()));
        PROGRAMS.put("window_of_windows", env -> fiveSeconds(env).reduce(new Sum()).keyBy(r -> r.f0, Types.STRING)
            .window(TumblingEventTimeWindows.of(Duration.ofSeconds(10))).process(new Dump<>()));
        PROGRAMS.put("interval_join", env -> {
            DataStream<Tuple3<String, Integer, Long>> rows = src(env);
            return rows.filter(r -> r.f1 % 2 == 1).keyBy(r -> r.f0, Types.STRING).intervalJoin(rows.filter(r -> r.f1 % 2 == 0).keyBy(r -> r.f0, Types.STRING))
                .between(Duration.ofSeconds(-3), Duration.ofSeconds(3))
                .process(new ProcessJoinFunction<Tuple3<String, Integer, Long>, Tuple3<String, Integer, Long>, String>() {
                    public void processElement(Tuple3<String, Integer, Long> l, Tuple3<String, Integer, Long> r, Context c, Collector<String> out) {
                        out.collect("key=" + l.f0 + " " + l.f1 + "-" + r.f1 + " at " + c.getTimestamp());
                    }
                });
        });
        PROGRAMS.put("continuous_trigger", env -> keyed(env).window(TumblingEventTimeWindows.of(Duration.ofSeconds(10)))
            .trigger(ContinuousEventTimeTrigger.of(Duration.ofSeconds(2))).process(new Dump<>()));
        PROGRAMS.put("continuous_trigger_on_a_global_window", env -> keyed(env).window(GlobalWindows.create())
            .trigger(ContinuousEventTimeTrigger.of(Duration.ofSeconds(5))).process(new Dump<>()));
        PROGRAMS.put("continuous_processing_time_trigger_on_a_global_window", env -> keyed(env).window(GlobalWindows.create())
            .trigger(ContinuousProcessingTimeTrigger.of(Duration.ofHours(1))).process(new Dump<>()));
        PROGRAMS.put("continuous_processing_time_trigger_on_clock_windows", env -> keyed(env).window(TumblingProcessingTimeWindows.of(Duration.ofDays(1)))
            .trigger(ContinuousProcessingTimeTrigger.of(Duration.ofHours(1))).process(new Dump<>()));
        PROGRAMS.put("count_window_average", env -> keyed(env).flatMap(new CountWindowAverage()));
    }

    static String json(Object o) {
        if (o instanceof Tuple3<?, ?, ?> t) return "[" + json(t.f0) + ", " + t.f1 + ", " + t.f2 + "]";
        return "\"" + o.toString().replace("\\", "\\\\").replace("\"", "\\\"") + "\"";
    }

    public static void main(String[] args) throws Exception {
        every = args[1].equals("RECORD") ? 1 : 3;
        List<String> names = args.length > 2 ? Arrays.asList(args).subList(2, args.length) : new ArrayList<>(PROGRAMS.keySet());
        for (String name : names) {
            // In STREAMING Flink never ends there: at the last watermark each timer registers the next one.
            if (args[0].equals("STREAMING") && name.equals("continuous_trigger_on_a_global_window")) continue;
            StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(1, new Configuration());
            env.setRuntimeMode(RuntimeExecutionMode.valueOf(args[0]));
            env.setBufferTimeout(args[0].equals("BATCH") ? -1 : 0);
            List<String> got = new ArrayList<>();
            try (var rows = PROGRAMS.get(name).apply(env).executeAndCollect()) {
                while (rows.hasNext()) got.add(json(rows.next()));
            }
            System.out.println("{\"program\": \"" + name + "\", \"mode\": \"" + args[0] + "\", \"watermarks\": \"" + args[1].toLowerCase() + "\", \"emits\": [" + String.join(", ", got) + "]}");
        }
        System.exit(0);
    }
}
