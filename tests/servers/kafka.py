"""A Kafka broker of one KRaft node, for tests and for people (`make kafka`).

`make .venv/kafka/ready` fetches its jars from Maven Central. It listens on two ports of the loopback interface: plain,
where every client may do everything, and with TLS and SASL/SCRAM, where the user `admin` may do everything and the user
`guest` what `allow` has given it.
"""

import base64
import datetime
import ipaddress
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.ports import free_port

JARS = Path(sys.prefix) / "kafka"
PASSWORDS = {"admin": "admin-5ecret", "guest": "guest-5ecret"}
START_SECONDS = 120
"""A machine with two busy cores takes several times the eight seconds that an idle one does."""


class Broker:
    """One broker with data of its own in `folder`; its ports stay the same when it starts again."""

    def __init__(self, folder: Path, port: int | None = None, heap: str = "384m", **config: str) -> None:
        self.folder = folder
        self._port, self._secure_port, self._controller_port = port or free_port(), free_port(), free_port()
        self._heap, self._config = heap, config
        self._process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def secure_address(self) -> str:
        return f"127.0.0.1:{self._secure_port}"

    @property
    def authority(self) -> Path:
        """The certificate that signed the broker's."""
        return self.folder / "authority.pem"

    @property
    def pid(self) -> int:
        return self._process.pid

    def security(self, user: str = "admin", password: str | None = None) -> dict[str, str]:
        """The options of a client of `secure_address`."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": PASSWORDS[user] if password is None else password,
            "ssl.ca.location": str(self.authority),
        }

    def start(self) -> "Broker":
        if not (self.folder / "server.properties").exists():
            self._format()
        with (self.folder / "broker.log").open("a") as log:
            self._process = subprocess.Popen(
                [*dies_with_us(), *self._java("kafka.Kafka", str(self.folder / "server.properties"))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the broker did not start:\n{(self.folder / 'broker.log').read_text()[-5000:]}")
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        """End it, as an administrator does."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Let it hang: connections stay open, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        end = time.monotonic() + START_SECONDS
        while not self._answers() and time.monotonic() < end:
            time.sleep(0.1)

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create_topic(self, name: str = "", partitions: int = 2, config: Mapping[str, str] | None = None) -> str:
        """A new topic; one without a name gets one that no other test has."""
        name = name or f"topic-{uuid.uuid4().hex[:12]}"
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self.admin.create_topics([topic])[name].result(30)
                break
            except KafkaException as error:
                # a starved broker misses a heartbeat, and is out for a moment
                if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR or time.monotonic() > end:
                    raise
                time.sleep(0.5)
        while not self._leads(name, partitions) and time.monotonic() < end:
            time.sleep(0.02)  # the broker answers before it has the partitions itself
        return name

    def _leads(self, topic: str, partitions: int) -> bool:
        known = self.admin.list_topics(topic, timeout=30).topics[topic].partitions
        return len(known) >= partitions and all(one.leader >= 0 for one in known.values())

    def delete_topic(self, name: str) -> None:
        self.admin.delete_topics([name])[name].result(30)
        end = time.monotonic() + START_SECONDS
        while name in self.admin.list_topics(timeout=30).topics and time.monotonic() < end:
            time.sleep(0.02)  # the broker answers before it has forgotten the topic itself

    def allow(self, user: str, operation: AclOperation, kind: ResourceType, name: str) -> None:
        """Give a user of `secure_address` a permission; `name` may be `*`."""
        rule = AclBinding(
            kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.ALLOW
        )
        self.admin.create_acls([rule])[rule].result(30)
        wanted = AclBindingFilter(
            kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.ALLOW
        )
        end = time.monotonic() + START_SECONDS
        while not self.admin.describe_acls(wanted).result(30) and time.monotonic() < end:
            time.sleep(0.02)  # the broker answers before it heeds the rule itself

    def write(self, topic: str, messages: Iterable[Mapping[str, object]]) -> None:
        """Produce messages, each given as the arguments of `Producer.produce`."""
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 5})
        failed: list[KafkaError] = []
        for message in messages:
            while True:
                try:
                    producer.produce(topic, on_delivery=lambda error, _: error and failed.append(error), **message)
                    break
                except BufferError:
                    producer.poll(0.1)
        left = producer.flush(60)
        if failed or left:
            raise RuntimeError(f"{len(failed)} messages failed, {left} are still queued: {failed[:1]}")

    def read(self, topic: str, committed: bool = True) -> list[Message]:
        """All messages of a topic, by partition and offset; `committed`: only those of committed transactions."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": f"read-{uuid.uuid4().hex}",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        try:
            partitions = list(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
            found, ended = [], set()
            while len(ended) < len(partitions):
                for message in consumer.consume(10_000, 0.2):
                    if message.error() is None:
                        found.append(message)
                    elif message.error().code() == KafkaError._PARTITION_EOF:
                        ended.add(message.partition())
                    else:
                        raise KafkaException(message.error())
            return sorted(found, key=lambda message: (message.partition(), message.offset()))
        finally:
            consumer.close()

    def values(self, topic: str, committed: bool = True) -> list[bytes | None]:
        return [message.value() for message in self.read(topic, committed)]

    def _answers(self) -> bool:
        with suppress(OSError, KafkaException):
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                pass
            client = AdminClient({"bootstrap.servers": self.address, "socket.timeout.ms": 2000, "log_level": 0})
            return bool(client.list_topics(timeout=3).brokers)
        return False

    def _java(self, *arguments: str) -> Sequence[str]:
        if not (JARS / "ready").exists():
            raise RuntimeError(f"the broker's jars are not in {JARS}: run make .venv/kafka/ready")
        return [
            "java", f"-Xmx{self._heap}", f"-Xms{self._heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{JARS}/*", *arguments,
        ]  # fmt: skip

    def _format(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        chain, key = _certificates(self.authority)
        controller = f"127.0.0.1:{self._controller_port}"
        listeners = f"PLAINTEXT://{self.address},SASL_SSL://{self.secure_address},CONTROLLER://{controller}"
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": controller,
            "controller.listener.names": "CONTROLLER",
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": chain.replace("\n", "\\n"),
            "ssl.keystore.key": key.replace("\n", "\\n"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:admin",
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "num.partitions": "2",
            "group.initial.rebalance.delay.ms": "0",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "2",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "2",
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            **self._config,
        }
        settings = self.folder / "server.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        users = [
            argument
            for name, password in PASSWORDS.items()
            for argument in ("--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]")
        ]
        arguments = ("format", "--standalone", f"--cluster-id={cluster}", "--config", str(settings), *users)
        done = subprocess.run(
            self._java("kafka.tools.StorageTool", *arguments), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the broker's storage could not be formatted: {done.stdout[-3000:]}{done.stderr[-3000:]}"
            )


def dies_with_us() -> Sequence[str]:
    """What makes a process end when the one that started it is killed, where the system can."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _certificates(authority: Path) -> tuple[str, str]:
    """Write an authority's certificate; return a chain and a key, signed by it, for a server at 127.0.0.1."""
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )

    signer, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = certificate("tests", "tests", signer).add_extension(x509.BasicConstraints(True, None), critical=True)
    leaf = certificate("broker", "tests", server).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    pem = serialization.Encoding.PEM
    authority.write_bytes(root.sign(signer, hashes.SHA256()).public_bytes(pem))
    key = server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return leaf.sign(signer, hashes.SHA256()).public_bytes(pem).decode(), key.decode()


def main() -> None:
    """Run a broker until Ctrl-C, on Kafka's own port where that is free."""
    with socket.socket() as tried:
        taken = tried.connect_ex(("127.0.0.1", 9092)) == 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kafka-") as folder:
        broker = Broker(Path(folder), None if taken else 9092, **{"auto.create.topics.enable": "true"})
        try:
            broker.start()
            print(f"Kafka listens on {broker.address}; Ctrl-C ends it and deletes its data", flush=True)
            print(f"with TLS and SASL/SCRAM on {broker.secure_address}: {broker.security()}", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print()
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
