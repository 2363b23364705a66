"""Functions of public PyFlink, Beam, Spark, Bytewax and Faust examples, as they are.

Fields of dicts are written as fields of records. Those whose function is None are described: they hold state, or count.
"""

# ruff: noqa

import itertools
import json
import re
from typing import NamedTuple

EXAMPLES = []


def add(source, kind, types, function, why=""):
    EXAMPLES.append((source, kind, types, function, why))


def T(*types):
    return tuple[types]


S, I, X = str, int, float


class Data(NamedTuple):
    id: int
    info: str


class Trip(NamedTuple):
    hvfhs_license_num: str | None
    trip_miles: float | None
    trip_time: int | None
    base_passenger_fare: float | None
    tips: float | None
    driver_pay: float | None


class Day(NamedTuple):
    year: int
    month: int
    day: int
    mean_temp: float


class Game(NamedTuple):
    user: str
    team: str
    score: int


class Click(NamedTuple):
    greeter: str
    message: str


# ---- PyFlink
add("DebugWorld/Flink-Python word_count_lambda", "flat_map", (S,), lambda x: str(x).split(","))
add("DebugWorld/Flink-Python word_count_lambda", "filter", (S,), lambda x: x)
add("DebugWorld/Flink-Python word_count_lambda", "map", (S,), lambda x: str(x).strip())
add("DebugWorld/Flink-Python word_count_lambda", "map", (S,), lambda x: (x, 1))
add("DebugWorld/Flink-Python word_count_lambda", "key_by", (T(S, I),), lambda x: x[0])
add("syedpeer7/Flink_WordCount", "flat_map", (S,), lambda line: line.lower().split())
add("syedpeer7/Flink_WordCount", "filter", (S,), lambda word: len(word) > 2)
add("syedpeer7/Flink_WordCount", "reduce", (T(S, I), T(S, I)), lambda a, b: (a[0], a[1] + b[1]))


def split_words(line):
    for word in line.lower().split():
        if word:
            yield (word, 1)


add("mainul098/flink-learning word_count", "flat_map", (S,), split_words)
add("pyflink demo", "map", (I,), lambda x: 2 * x)


def split(s: str):
    splits = s.split(" ")
    for sp in splits:
        yield sp, len(sp)


add("pyflink demo", "flat_map", (S,), split)


def update_tel(data):
    # parse the json
    json_data = json.loads(data.info)
    json_data["tel"] += 1
    return data.id, json.dumps(json_data)


add("apache/flink basic_operations", "map", (Data,), update_tel)
add("apache/flink basic_operations", "filter", (Data,), lambda data: data.id == 1)
add(
    "apache/flink basic_operations",
    "map",
    (Data,),
    lambda data: (json.loads(data.info)["addr"]["country"], json.loads(data.info)["tel"]),
)


def extract1(value, record_timestamp):
    return int(value[1])


add("apache/flink tumbling_time_window", "timestamps", (T(S, I), I), extract1)
add("apache/flink tumbling_time_window", "window process", (T(S, I),), None, "pruning: window function, reads no field")
add(
    "apache/flink event_time_timer Sum",
    "keyed process",
    (T(I, S, X),),
    None,
    "pruning: state and timers, reads 1 of 3 fields",
)
add("apache/flink event_time_timer", "key_by", (T(I, S, X),), lambda value: value[1])


def extract0(value, record_timestamp: int) -> int:
    return int(value[0])


add("apache/flink event_time_timer", "timestamps", (T(I, S, X), I), extract0)


def split_line(line):
    yield from line.split()


add("apache/flink word_count", "flat_map", (S,), split_line)
# ---- Beam
add("DMSJerk/NYCTaxi", "flat_map", (S,), lambda x: x.split("\n"))
add("DMSJerk/NYCTaxi", "map", (S,), lambda x: x.split("\t"))
add("DMSJerk/NYCTaxi", "map", (T(S, S),), lambda x: (x[0], int(x[1])))
add("DMSJerk/NYCTaxi", "map", (T(S, I),), lambda x: print(x))


def total_words(row):
    if "beam" in row:
        yield ("beam", row.count("beam"))


add("hemanthk97 combineperkey", "flat_map", (S,), total_words)
add("beam combine_values", "map", (I,), lambda val: sum(val))
add("apache/beam user_score ParseGameEventFn", "flat_map", (S,), None, "no: csv.reader, try/except, counters, logging")


class _Extract:
    field = "user"

    def f(self):
        return lambda elem: (getattr(elem, self.field), elem.score)


add("apache/beam user_score", "map", (Game,), _Extract().f())


def format_user_score_sums(user_score):
    (user, score) = user_score
    return "user: %s, total_score: %s" % (user, score)


add("apache/beam user_score", "map", (T(S, I),), format_user_score_sums)
add("apache/beam filters", "map", (Day,), lambda row: row.mean_temp)


def _mf(month_filter):
    return lambda row: row.month == month_filter


add("apache/beam filters", "filter", (Day,), _mf(7))
add("apache/beam filters", "filter", (Day, X), lambda row, mean: row.mean_temp < mean)
add(
    "apache/beam avro_nyc_trips",
    "filter",
    (Trip,),
    lambda record: all(getattr(record, k) is not None for k in ("hvfhs_license_num", "trip_miles", "trip_time")),
)


def service(record):
    options = {"HV0002": "Juno", "HV0003": "Uber", "HV0004": "Via", "HV0005": "Lyft"}
    return options.get(record.hvfhs_license_num)


add("apache/beam avro_nyc_trips (part of CreateKey)", "map", (Trip,), service)
add(
    "apache/beam avro_nyc_trips add_input",
    "aggregate",
    (Trip,),
    None,
    "pruning: sum over a generator, floats; reads 9 of 24 fields",
)


def extract_output(accumulator):
    (
        total_price,
        total_driver_pay,
        total_trip_miles,
        total_trip_time,
        total_number_of_trips,
    ) = accumulator
    total_trip_minutes = total_trip_time / 60
    return (
        total_driver_pay,
        total_price,
        total_trip_miles,
        total_trip_minutes,
        total_number_of_trips,
        total_price / total_number_of_trips,
        total_price / total_trip_miles,
        total_price / total_trip_minutes,
        total_driver_pay / total_number_of_trips,
        total_trip_miles / (total_trip_minutes / 60),
    )


add("apache/beam avro_nyc_trips", "map", (T(X, X, X, X, I),), extract_output)
add("apache/beam avro_nyc_trips flatten_group", "map", (Trip,), None, "no: changes its record")
add("beam quick start", "map", (T(S, I),), lambda x: (x[0], x[1] ** 2))
# ---- Bytewax
add("mcgarrigle bytewax-simple", "map", (S,), lambda x: x.value.decode("utf-8"))


def times_two(inp: int) -> int:
    return inp * 2


add("bytewax anaximander", "map", (I,), times_two)


def minus_one(x):
    return x - 1


add("bytewax basic", "map", (I,), minus_one)


def stringy(x):
    return f"<dance>{x}</dance>"


add("bytewax basic", "map", (I,), stringy)


def filter_op(x):
    return x % 2 == 0


add("bytewax events", "filter", (I,), filter_op)


def filter_map_op(x):
    if x == 0:
        return None
    else:
        return x * 2


add("bytewax events", "map", (I,), filter_map_op)


def flat_map_op(x):
    return range(x)


add("bytewax events", "flat_map", (I,), flat_map_op)


def key_init(line):
    key, x = line.split(";")
    x = float(x)
    return (key, (x, x, x, 1))


add("bytewax 1brc", "map", (S,), key_init)


def reducer(x, y):
    x_min, x_max, x_sum, x_count = x
    y_min, y_max, y_sum, y_count = y
    return (min(x_min, y_min), max(x_max, y_max), x_sum + y_sum, x_count + y_count)


add("bytewax 1brc", "reduce", (T(X, X, X, I), T(X, X, X, I)), reducer)


def mapper(key_state):
    key, min_x, max_x, sum_x, count = key_state
    mean = sum_x / count
    return f"{key}={min_x:.1f}/{max_x:.1f}/{mean:.1f}"


add("bytewax 1brc", "map", (T(S, X, X, X, I),), mapper)


def lower(line):
    return line.lower()


add("bytewax wordcount/apriori", "map", (S,), lower)


def tokenize(line):
    return [word.strip() for word in line.split(",")]


add("bytewax apriori", "flat_map", (S,), tokenize)


def initial_count(word):
    return word, 1


add("bytewax wordcount", "map", (S,), initial_count)
most_popular_products: dict[str, int] = {}


def is_most_common(item):
    return any((i in most_popular_products) for i in tokenize(item))


add("bytewax apriori", "filter", (S,), is_most_common)


def build_pairs(line):
    tokens = tokenize(line)
    for left, right in itertools.combinations(tokens, 2):
        yield "-".join(sorted((left, right)))


add("bytewax apriori", "flat_map", (S,), build_pairs)


def re_tokenize(line):
    return re.findall(r'[^\s!,.?":;0-9]+', line)


add("bytewax wordcount", "flat_map", (S,), re_tokenize)


def add_counts(count1, count2):
    return count1 + count2


add("bytewax wordcount", "reduce", (I, I), add_counts)


def is_search(event):
    return type(event).__name__ == "Search"


add("bytewax search_session", "filter", (Data,), is_search)


def remove_key(user_event):
    user, event = user_event
    return event


add("bytewax search_session", "map", (T(S, S),), remove_key)
add("bytewax search_session", "key_by", (Data,), lambda e: str(e.id))
add("bytewax search_session calc_ctr", "map", (S,), None, "no: any() over a list of records")
add("bytewax anomaly_detector", "keyed process", (T(S, X),), None, "no: state; reads 1 of 2 fields")
# ---- Spark RDD
add("Falonie/LearningSpark 4-4", "map", (S,), lambda x: (x.split(" ")[0], x))
add("Falonie/LearningSpark 4-4", "filter", (T(S, S),), lambda keyValue: len(keyValue[1]) < 20)
add("haritaa rdd-wordcount", "map", (T(S, I),), lambda x: (x[1], x[0]))
add("haritaa rdd-wordcount", "filter", (T(I, S),), lambda x: "a" in x[1])
add("haritaa rdd-wordcount", "reduce", (I, I), lambda a, b: a + b)
add("spark notes", "map", (I,), lambda x: x * x)


def parseLine(line):
    fields = line.split(",")
    age = int(fields[2])
    numFriends = int(fields[3])
    return (age, numFriends)


add("friends-by-age", "map", (S,), parseLine)
add("friends-by-age", "map", (I,), lambda x: (x, 1))
add("friends-by-age", "reduce", (T(I, I), T(I, I)), lambda x, y: (x[0] + y[0], x[1] + y[1]))
add("friends-by-age", "map", (T(I, I),), lambda x: x[0] / x[1])
add("leonLearnAI", "flat_map", (S,), lambda x: x.split())
# ---- Faust
add("faust word_count shuffle_words", "flat_map", (S,), lambda post: [w for w in post.split()])
add("faust word_count count_words", "keyed process", (S,), None, "no: a table that it updates")
add("virmos building_table", "key_by", (Click,), lambda g: g.greeter)
add("LukiyanK Order", "map", (Data,), lambda order: print(f"Order for {order.id}: {order.info}"))
