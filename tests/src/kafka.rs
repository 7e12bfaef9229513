//! A real Apache Kafka broker for the tests: one KRaft node on loopback, in a process of its own.
//!
//! Takes a Java runtime (17 or later) and the jars that `tests/run` fetches (deploy/kafka/pom.xml); gives the address
//! of a broker that answers. The embedded broker of the demo is librdkafka's mock: it has no groups that outlive a
//! member, no retention and no log on disk, so what must hold in a cluster is tested here.
//!
//! It does not create topics, speak the Kafka protocol or run more than one node. It leaves nothing behind: a watchdog
//! beside the broker ends it and removes its directory when the test process goes away, however it goes.
//!
//! Environment: `GPUFLEET_KAFKA_BROKERS` names a cluster to use instead; nothing is started or stopped then.
//! `GPUFLEET_KAFKA_LIB` names the directory with the jars; without it the cache that `tests/run` fills is used.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The version in deploy/kafka/pom.xml; part of the cache directory's name.
const VERSION: &str = "4.4.0";
/// How long a broker may take from its start until it answers.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How often a start is tried when another process takes a port between our look and the broker's bind.
const ATTEMPTS: usize = 3;
/// How many last lines of the broker's log an error shows.
const LOG_LINES: usize = 30;
/// How many lines with an error from before those.
const LOG_ERRORS: usize = 6;

/// A broker, or a handle on the cluster that `GPUFLEET_KAFKA_BROKERS` names.
///
/// Dropping it kills a broker that was started here, waits for it and removes its data.
pub struct Kafka {
    bootstrap: String,
    /// None on an existing cluster.
    node: Option<Node>,
}

impl Kafka {
    /// Starts a broker on free loopback ports with an empty data directory and waits until it answers.
    ///
    /// # Errors
    /// A sentence that says what is missing and what to run, or why the broker ended, with the end of its log.
    pub fn start() -> Result<Kafka, String> {
        match env::var("GPUFLEET_KAFKA_BROKERS") {
            Ok(brokers) if !brokers.trim().is_empty() => Ok(Kafka { bootstrap: brokers.trim().to_owned(), node: None }),
            _ => Kafka::start_node(),
        }
    }

    /// As `start`, whatever `GPUFLEET_KAFKA_BROKERS` says: for tests that kill their broker.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_node() -> Result<Kafka, String> {
        let node = Node::start()?;
        Ok(Kafka { bootstrap: format!("127.0.0.1:{}", node.ports.client), node: Some(node) })
    }

    /// The address for `bootstrap.servers`; the same before and after a restart.
    #[must_use]
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Ends the broker with SIGKILL and returns once it is gone. Its data stays; a dead broker is left alone.
    ///
    /// # Errors
    /// On an existing cluster, which is not ours to stop.
    pub fn kill(&mut self) -> Result<(), String> {
        self.owned()?.broker = None;
        Ok(())
    }

    /// Kills the broker if it runs, starts it again with the same ports and data, and waits until it answers.
    ///
    /// # Errors
    /// As `start`, and on an existing cluster.
    pub fn restart(&mut self) -> Result<(), String> {
        let node = self.owned()?;
        node.broker = None;
        node.launch().map_err(Refusal::sentence)
    }

    fn owned(&mut self) -> Result<&mut Node, String> {
        let Kafka { bootstrap, node } = self;
        node.as_mut().ok_or_else(|| {
            format!(
                "the cluster at {bootstrap} was not started by the tests; unset GPUFLEET_KAFKA_BROKERS to run this one"
            )
        })
    }
}

/// The broker that the tests of one binary share, started by the first that asks. It ends with the process.
///
/// It hands out no `kill`: a test that does harm starts its own with `Kafka::start_node`.
///
/// # Panics
/// With the sentence of `Kafka::start` when it cannot start; every later caller gets the same sentence at once.
pub fn shared() -> &'static Kafka {
    static SHARED: OnceLock<Result<Kafka, String>> = OnceLock::new();
    match SHARED.get_or_init(Kafka::start) {
        Ok(kafka) => kafka,
        Err(sentence) => panic!("{sentence}"),
    }
}

/// What stays when the broker process is killed: its ports, its settings and its data.
///
/// Fields drop in order: the process is gone before its directory is removed.
struct Node {
    broker: Option<Broker>,
    ports: Ports,
    lib: PathBuf,
    directory: TempDir,
}

impl Node {
    fn start() -> Result<Node, String> {
        let lib = jars()?;
        for attempt in 1.. {
            let mut node = Node::format(lib.clone())?;
            match node.launch() {
                Ok(()) => return Ok(node),
                // Settings and data name the ports, so that other ports are another node.
                Err(Refusal::PortTaken(_)) if attempt < ATTEMPTS => {}
                Err(refusal) => return Err(refusal.sentence()),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Chooses ports, writes the settings and formats the data directory.
    fn format(lib: PathBuf) -> Result<Node, String> {
        let failed = |error: io::Error| format!("cannot prepare a directory for the test broker: {error}");
        let directory = tempfile::Builder::new().prefix("gpufleet-kafka-").tempdir().map_err(failed)?;
        let ports = Ports::free().map_err(|error| format!("finds no free port for the test broker: {error}"))?;
        let settings = settings(&ports, &directory.path().join("data"));
        fs::write(directory.path().join("server.properties"), settings).map_err(failed)?;
        fs::write(directory.path().join("log4j2.properties"), LOGGING).map_err(failed)?;
        let node = Node { broker: None, ports, lib, directory };

        let output = Command::new("java")
            .args(node.java_arguments("kafka.tools.StorageTool"))
            .args(["format", "--standalone", "--cluster-id", &cluster_id().map_err(failed)?, "--config"])
            .arg(node.file("server.properties"))
            .stdin(Stdio::null())
            .output()
            .map_err(|error| java_missing(&error))?;
        if output.status.success() {
            return Ok(node);
        }
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        Err(format!(
            "the test broker's data directory cannot be formatted ({}); Java 17 or later is needed; it said:\n{}",
            output.status,
            why(&said)
        ))
    }

    /// Starts the process and waits until it answers.
    fn launch(&mut self) -> Result<(), Refusal> {
        let log = self.file("broker.log");
        let said_before = fs::metadata(&log).map_or(0, |metadata| metadata.len());
        let broker = self.broker.insert(Broker::spawn(
            self.directory.path(),
            &log,
            [self.java_arguments("kafka.Kafka"), vec![path_text(&self.file("server.properties"))]].concat(),
        )?);
        let verdict = broker.wait_until_ready(self.ports.client, &log, said_before);
        if verdict.is_err() {
            self.broker = None;
        }
        verdict
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn java_arguments(&self, class: &str) -> Vec<String> {
        let logging = format!("-Dlog4j2.configurationFile={}", path_text(&self.file("log4j2.properties")));
        let jars = format!("{}/*", path_text(&self.lib));
        // A test broker lives for minutes: the quick compiler and the plain collector start it soonest.
        let machine =
            ["-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"];
        let mut arguments: Vec<String> = machine.map(str::to_owned).to_vec();
        arguments.extend([logging, "-cp".to_owned(), jars, class.to_owned()]);
        arguments
    }
}

/// A running broker process. Dropping it kills it and waits for its end.
struct Broker {
    /// The shell of `SCRIPT`, which becomes the Java process: one id for both.
    process: Child,
}

/// Starts the watchdog, then becomes the broker. `$1` is the directory, the rest are Java's arguments.
///
/// The watchdog reads our end of a pipe. The word `done` dismisses it: the broker was ended and reaped here, and its id
/// may belong to another process by now. An end without that word means that the test process is gone, killed or over
/// with a static broker, and that nobody else will clean up.
const SCRIPT: &str = r#"
directory=$1
shift
exec 3<&0
(
    if [ "$(cat <&3)" != done ]; then
        kill -9 $$
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            kill -0 $$ && sleep 0.1
        done
        rm -rf -- "$directory"
    fi
) 2>/dev/null &
exec java "$@" 3<&- </dev/null
"#;

impl Broker {
    fn spawn(directory: &Path, log: &Path, java_arguments: Vec<String>) -> Result<Broker, Refusal> {
        let failed = |error: io::Error| Refusal::Ended(format!("cannot start the test broker: {error}"));
        let out = File::options().append(true).create(true).open(log).map_err(failed)?;
        let err = out.try_clone().map_err(failed)?;
        let process = Command::new("sh")
            .args(["-c", SCRIPT, "gpufleet-kafka"])
            .arg(directory)
            .args(java_arguments)
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            // Ctrl-C at a terminal then reaches the test process alone, and the watchdog sees it end.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Broker { process })
    }

    /// Ready means that the broker says so, which it does once its controller has unfenced it, and that its port opens.
    fn wait_until_ready(&mut self, port: u16, log: &Path, said_before: u64) -> Result<(), Refusal> {
        let deadline = Instant::now() + READY_WITHIN;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        loop {
            // Looked at first, so that the log below is whole when the process has ended.
            let ended = self.process.try_wait().ok().flatten();
            let said = since(log, said_before);
            if let Some(status) = ended {
                let sentence =
                    format!("the test broker ended while starting ({status}); its log says:\n{}", why(&said));
                let taken = said.contains("BindException") || said.contains("Address already in use");
                return Err(if taken { Refusal::PortTaken(sentence) } else { Refusal::Ended(sentence) });
            }
            if said.contains("Kafka Server started")
                && TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
            {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Refusal::Ended(format!(
                    "the test broker at {address} does not answer after {} s; its log says:\n{}",
                    READY_WITHIN.as_secs(),
                    why(&said)
                )));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Taken first: `wait` closes it, which the watchdog would read as the end of this process.
        let watchdog = self.process.stdin.take();
        // Each of these fails only when there is nothing left to end.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(mut watchdog) = watchdog {
            let _ = watchdog.write_all(b"done");
        }
    }
}

/// Why a broker did not come up.
enum Refusal {
    /// Another process took a port between our look and the broker's bind.
    PortTaken(String),
    /// Anything else.
    Ended(String),
}

impl Refusal {
    fn sentence(self) -> String {
        match self {
            Refusal::PortTaken(sentence) | Refusal::Ended(sentence) => sentence,
        }
    }
}

struct Ports {
    client: u16,
    controller: u16,
}

impl Ports {
    /// Two ports that were free a moment ago, from below the range that Linux gives to outgoing connections.
    ///
    /// `bind` to port 0 takes from that range. While a broker there is down, a client that tries to reconnect may be
    /// given the broker's port as its own, connect to itself, and keep the broker from coming back.
    fn free() -> io::Result<Ports> {
        const TRIES: usize = 200;
        let mut held: Vec<TcpListener> = Vec::new();
        for _ in 0..TRIES {
            let [high, low] = random::<2>()?;
            let port = 20_000 + u16::from_be_bytes([high, low]) % 12_000;
            held.extend(TcpListener::bind(("127.0.0.1", port)));
            if let [client, controller] = &held[..] {
                return Ok(Ports { client: client.local_addr()?.port(), controller: controller.local_addr()?.port() });
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "the ports 20000 to 31999 on 127.0.0.1 are in use"))
    }
}

/// server.properties: one node that is broker and controller, every internal topic with one replica.
///
/// A killed broker cannot register again before its last session has run out, so a restart takes that long at least:
/// 3 s with six heartbeats in it, where Kafka's own 9 s make the restart of a test 13 s long.
fn settings(ports: &Ports, data: &Path) -> String {
    let Ports { client, controller } = ports;
    format!(
        "process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
log.cleaner.dedupe.buffer.size=16777216
",
        data = path_text(data)
    )
}

/// log4j2.properties: everything from INFO up to standard output, which is broker.log.
const LOGGING: &str = "status=warn
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{HH:mm:ss.SSS} %-5p %c{1}: %m%n
rootLogger.level=info
rootLogger.appenderRef.console.ref=console
";

/// The directory with the jars, or the sentence that says how to get them.
fn jars() -> Result<PathBuf, String> {
    let named = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let lib = named("GPUFLEET_KAFKA_LIB").unwrap_or_else(|| {
        let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache"))).unwrap_or_default();
        cache.join("gpufleet").join(format!("kafka-{VERSION}")).join("lib")
    });
    let broker = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("kafka_2.13-") && name.ends_with(".jar")
    };
    if fs::read_dir(&lib).is_ok_and(|entries| entries.flatten().any(|entry| broker(&entry))) {
        return Ok(lib);
    }
    let lib = lib.display();
    Err(format!(
        "no Kafka jars in {lib}; run tests/run, or `mvn -q -B -f deploy/kafka/pom.xml dependency:copy-dependencies \
         -DoutputDirectory={lib}`, or set GPUFLEET_KAFKA_BROKERS to a cluster that runs"
    ))
}

fn java_missing(error: &io::Error) -> String {
    format!("cannot run java ({error}); run tests/run, or install a Java runtime, 17 or later (default-jdk-headless)")
}

/// A KRaft cluster id: 16 random bytes in URL-safe base64 without padding.
///
/// The top bit is cleared: an id with a leading `-` reads as an option.
fn cluster_id() -> io::Result<String> {
    let mut bytes = random::<16>()?;
    bytes[0] &= 0x7f;
    Ok(base64_url(&bytes))
}

/// RFC 4648 section 5, without padding.
fn base64_url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().enumerate().fold(0_u32, |group, (at, byte)| group | u32::from(*byte) << (16 - 8 * at));
        for at in 0..=chunk.len() {
            text.push(char::from(ALPHABET[(group >> (18 - 6 * at)) as usize & 63]));
        }
    }
    text
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// What the file holds from `start` on; nothing when it cannot be read.
fn since(path: &Path, start: u64) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let start = usize::try_from(start).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[start..]).into_owned()
}

/// The first lines that tell of an error, then the last lines: a broker that fails goes on about its shutdown.
fn why(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    let (before, last) = lines.split_at(lines.len().saturating_sub(LOG_LINES));
    // The head of a stack trace counts; the controller also tells of exceptions that are nothing (INFO).
    let errors = before.iter().filter(|line| {
        let names = |word| line.contains(word);
        names(" ERROR ") || names(" FATAL ") || (names("Exception: ") && !names(" INFO "))
    });
    errors.take(LOG_ERRORS).chain(last).copied().collect::<Vec<_>>().join("\n")
}

/// Kafka's settings are text; the cache and the temporary directory are named by people, in UTF-8.
fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_url_matches_rfc_4648() {
        for (bytes, text) in [(&b""[..], ""), (b"f", "Zg"), (b"fo", "Zm8"), (b"foo", "Zm9v"), (b"foobar", "Zm9vYmFy")] {
            assert_eq!(base64_url(bytes), text);
        }
        assert_eq!(base64_url(&[0xfb, 0xff, 0xfe]), "-__-");
    }

    #[test]
    fn why_shows_an_early_error_before_the_last_lines() {
        let shutdown = "INFO stopped\n".repeat(50);
        let said = why(&format!("1 INFO  a FooException: b\n2 ERROR Acceptor: in use\n{shutdown}"));
        assert_eq!(said.lines().next(), Some("2 ERROR Acceptor: in use"));
        assert_eq!(said.lines().count(), 1 + LOG_LINES);
    }

    #[test]
    fn cluster_id_has_22_characters_and_never_reads_as_an_option() {
        for _ in 0..200 {
            let id = cluster_id().unwrap();
            assert_eq!(id.len(), 22, "{id}");
            assert!(!id.starts_with('-'), "{id}");
        }
    }

    #[test]
    fn killed_broker_returns_at_its_address_and_a_dropped_one_leaves_nothing() {
        let answers = |address: &str| TcpStream::connect(address).is_ok();
        let mut kafka = Kafka::start_node().unwrap_or_else(|sentence| panic!("{sentence}"));
        let address = kafka.bootstrap().to_owned();
        let directory = kafka.node.as_ref().unwrap().directory.path().to_owned();
        assert!(answers(&address));

        kafka.kill().unwrap();
        assert!(!answers(&address), "a killed broker still answers");
        let data = directory.join("data").join("meta.properties");
        assert!(data.exists(), "killing a broker took its data");

        kafka.restart().unwrap_or_else(|sentence| panic!("{sentence}"));
        assert_eq!(kafka.bootstrap(), address);
        assert!(answers(&address));

        drop(kafka);
        assert!(!answers(&address), "a dropped broker still answers");
        assert!(!directory.exists(), "a dropped broker left its directory");
    }
}
