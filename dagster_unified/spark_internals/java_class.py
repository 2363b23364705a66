"""Classes of ours in Spark's JVM, from Java source.

Janino, with which Spark compiles its own code, compiles them, once in a process. They are defined in the loader that
has Spark's, where streams and tasks look by name; executors elsewhere load them from a jar. Knows Spark's JVM; not what
a class does.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER = Path(__file__).parent
"""Where the sources of the library's classes are."""

_installing = Lock()


class JavaClass:
    """A class of that name and its source. Its methods raise `Py4JError` where this Spark cannot have it."""

    def __init__(self, name: str, source: Path) -> None:
        self.name = name
        self.source = source
        self._bytecodes: dict[str, bytes] = {}
        self._shipped: set[str] = set()
        """The applications whose executors have the class; the JVM has it for as long as it runs."""

    def install(self, session: SparkSession) -> None:
        """Load the class into the JVM of a classic session, where it stays for as long as the JVM runs."""
        from py4j import java_gateway

        jvm: Any = session._jvm
        with _installing:
            if not isinstance(getattr(jvm, self.name), java_gateway.JavaClass):  # but what could be a package
                self._define(session, self.bytecodes(jvm))

    def ship(self, session: SparkSession) -> None:
        """Let the executors of a classic session load the class as well."""
        context: Any = session.sparkContext
        with _installing:
            if context._jsc.sc().isLocal() or context.applicationId in self._shipped:
                return
            folder = context._jvm.org.apache.spark.util.Utils.createTempDir()  # which goes with the JVM
            jar = Path(str(folder), f"{self.source.stem}.jar")
            with ZipFile(jar, "w") as archive:
                for name, code in self.bytecodes(context._jvm).items():
                    archive.writestr(f"{name.replace('.', '/')}.class", code)
            context._jsc.addJar(str(jar))
            self._shipped.add(context.applicationId)

    def bytecodes(self, jvm: Any) -> dict[str, bytes]:
        """Return the compiled class, and those within it, by name."""
        if not self._bytecodes:
            compiler = jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getSparkClassLoader())
            compiler.cook(self.source.read_text())
            self._bytecodes.update((str(name), bytes(code)) for name, code in compiler.getBytecodes().items())
        return self._bytecodes

    def _define(self, session: SparkSession, classes: dict[str, bytes]) -> None:
        jvm: Any = session._jvm
        gateway = session.sparkContext._gateway
        assert gateway is not None
        kinds = gateway.new_array(jvm.java.lang.Class, 4)
        kinds[0], kinds[1] = jvm.java.lang.Class.forName("java.lang.String"), jvm.java.lang.Class.forName("[B")
        kinds[2] = kinds[3] = jvm.java.lang.Integer.TYPE
        define = jvm.java.lang.Class.forName("java.lang.ClassLoader").getDeclaredMethod("defineClass", kinds)
        define.setAccessible(True)
        for name, code in sorted(classes.items(), reverse=True):  # those within the class before it
            arguments = gateway.new_array(jvm.java.lang.Object, 4)
            arguments[0], arguments[1], arguments[2], arguments[3] = name, bytearray(code), 0, len(code)
            define.invoke(jvm.org.apache.spark.util.Utils.getSparkClassLoader(), arguments)
