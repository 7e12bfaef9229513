//! A real Apache Kafka broker for the tests: one KRaft node on loopback, in a process of its own.
//!
//! Takes a Java runtime (17 or later) and the jars that `tests/run` fetches (deploy/kafka/pom.xml); gives the address
//! of a broker that answers. The embedded broker of the demo is librdkafka's mock: it has no groups that outlive a
//! member, no retention and no log on disk, so what must hold in a cluster is tested here.
//!
//! It does not create topics or speak the Kafka protocol; three nodes are `cluster`, on the `Node` here. It leaves
//! nothing behind: a watchdog beside the broker ends it and removes its directory when the test process goes away,
//! however it goes.
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

use rdkafka::admin::AdminClient;
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;

use tempfile::TempDir;

/// The version in deploy/kafka/pom.xml; part of the cache directory's name.
const VERSION: &str = "4.4.0";
/// How long a broker may take from its start until it answers, and from SIGTERM until it is gone.
const PATIENCE: Duration = Duration::from_secs(60);
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
        let lib = jars()?;
        let node = with_free_ports(|| {
            let ports = free_ports()?;
            let [client, _] = ports;
            let (own, quorum, memory) = (alone(ports), &["--standalone"][..], ["-Xms256m", "-Xmx512m"]);
            let plan = Plan { client, own, quorum, cluster_id: &cluster_id()?, memory };
            let mut node = Node::format(lib.clone(), &plan)?;
            node.spawn()?;
            node.wait_until_ready()?;
            Ok(node)
        })?;
        Ok(Kafka { bootstrap: format!("127.0.0.1:{}", node.client), node: Some(node) })
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
        self.owned()?.kill();
        Ok(())
    }

    /// Kills the broker if it runs, starts it again with the same ports and data, and waits until it answers.
    ///
    /// # Errors
    /// As `start`, and on an existing cluster.
    pub fn restart(&mut self) -> Result<(), String> {
        let node = self.owned()?;
        node.spawn().and_then(|()| node.wait_until_ready()).map_err(Refusal::sentence)
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

/// A client that changes topics.
///
/// # Panics
/// When the client's settings are refused.
#[must_use]
pub fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).create().expect("an admin client")
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

/// What stays when the broker process is killed: its port, its settings and its data.
///
/// Fields drop in order: the process is gone before its directory is removed.
pub(crate) struct Node {
    broker: Option<Broker>,
    /// The port where it answers clients.
    pub client: u16,
    memory: [&'static str; 2],
    lib: PathBuf,
    pub directory: TempDir,
}

/// What makes a node this one.
pub(crate) struct Plan<'a> {
    /// The port where it answers clients.
    pub client: u16,
    /// Its lines of server.properties beside `COMMON`.
    pub own: String,
    /// Arguments of the format that say which controllers there are, where its settings do not.
    pub quorum: &'a [&'a str],
    /// The same for all nodes of a cluster.
    pub cluster_id: &'a str,
    /// Java's first and last heap size.
    pub memory: [&'static str; 2],
}

impl Node {
    /// Writes the settings and formats the data directory.
    pub(crate) fn format(lib: PathBuf, plan: &Plan) -> Result<Node, Refusal> {
        let directory = tempfile::Builder::new().prefix("gpufleet-kafka-").tempdir()?;
        let data = path_text(&directory.path().join("data"));
        let settings = format!("{}{COMMON}log.dirs={data}\n", plan.own);
        fs::write(directory.path().join("server.properties"), settings)?;
        fs::write(directory.path().join("log4j2.properties"), LOGGING)?;
        let node = Node { broker: None, client: plan.client, memory: plan.memory, lib, directory };

        let output = Command::new("java")
            .args(node.java_arguments("kafka.tools.StorageTool"))
            .arg("format")
            .args(plan.quorum)
            .args(["--cluster-id", plan.cluster_id, "--config"])
            .arg(node.file("server.properties"))
            .stdin(Stdio::null())
            .output()
            .map_err(|error| Refusal::Ended(java_missing(&error)))?;
        if output.status.success() {
            return Ok(node);
        }
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        Err(Refusal::Ended(format!(
            "the test broker's data directory cannot be formatted ({}); Java 17 or later is needed; it said:\n{}",
            output.status,
            why(&said)
        )))
    }

    /// Starts the process; one that runs is killed first.
    pub(crate) fn spawn(&mut self) -> Result<(), Refusal> {
        self.kill();
        let mut arguments = self.java_arguments("kafka.Kafka");
        arguments.push(path_text(&self.file("server.properties")));
        self.broker = Some(Broker::spawn(self.directory.path(), self.file("broker.log"), arguments)?);
        Ok(())
    }

    /// Waits until the process that was started answers; one that does not is killed. Without a process, nothing.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), Refusal> {
        let verdict = self.broker.as_mut().map_or(Ok(()), |broker| broker.wait_until_ready(self.client));
        if verdict.is_err() {
            self.kill();
        }
        verdict
    }

    /// Ends the process with SIGKILL and returns once it is gone. Its data stays; a dead one is left alone.
    pub(crate) fn kill(&mut self) {
        self.broker = None;
    }

    /// Lets the process shut down as an operator would, also a frozen one, and returns once it is gone.
    pub(crate) fn stop(&mut self) -> Result<(), String> {
        self.signal("TERM")?;
        self.signal("CONT")?;
        if let Some(broker) = &mut self.broker {
            broker.wait_until_gone()?;
        }
        self.kill();
        Ok(())
    }

    /// Sends a signal, named without SIG, to the broker.
    pub(crate) fn signal(&self, name: &str) -> Result<(), String> {
        let Some(broker) = &self.broker else {
            return Err(format!("the test broker on port {} does not run, so that SIG{name} has no aim", self.client));
        };
        // Its id is its own until `Broker` waits for it. The process alone: its watchdog is in the same group.
        let sent = Command::new("kill").args(["-s", name, &broker.process.id().to_string()]).status();
        match sent {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("kill cannot send SIG{name} to the test broker ({status})")),
            Err(error) => Err(format!("cannot run kill ({error}); install procps")),
        }
    }

    pub(crate) fn running(&self) -> bool {
        self.broker.is_some()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn java_arguments(&self, class: &str) -> Vec<String> {
        let logging = format!("-Dlog4j2.configurationFile={}", path_text(&self.file("log4j2.properties")));
        let jars = format!("{}/*", path_text(&self.lib));
        // A test broker lives for minutes: the quick compiler and the plain collector start it soonest.
        let machine = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"];
        let mut arguments: Vec<String> = self.memory.into_iter().chain(machine).map(str::to_owned).collect();
        arguments.extend([logging, "-cp".to_owned(), jars, class.to_owned()]);
        arguments
    }
}

/// A running broker process. Dropping it kills it and waits for its end.
struct Broker {
    /// The shell of `SCRIPT`, which becomes the Java process: one id for both.
    process: Child,
    log: PathBuf,
    /// How long the log was before this process.
    said_before: u64,
}

/// Starts the watchdog, then becomes the broker. `$1` is the directory, the rest are Java's arguments.
///
/// The watchdog reads our end of a pipe. The word `done` dismisses it: the broker was ended and reaped here, and its id
/// may belong to another process by now. An end without that word means that the test process is gone, killed or over
/// with a static broker, and that nobody else will clean up. The kernel then sends SIGHUP to the group of a frozen
/// broker, which must not end the watchdog.
const SCRIPT: &str = r#"
directory=$1
shift
exec 3<&0
(
    trap '' HUP
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
    fn spawn(directory: &Path, log: PathBuf, java_arguments: Vec<String>) -> Result<Broker, Refusal> {
        let out = File::options().append(true).create(true).open(&log)?;
        let err = out.try_clone()?;
        let said_before = out.metadata()?.len();
        let process = Command::new("sh")
            .args(["-c", SCRIPT, "gpufleet-kafka"])
            .arg(directory)
            .args(java_arguments)
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            // Ctrl-C at a terminal then reaches the test process alone, and the watchdog sees it end.
            .process_group(0)
            .spawn()?;
        Ok(Broker { process, log, said_before })
    }

    /// Ready means that the broker says so, which it does once its controller has unfenced it, and that its port opens.
    fn wait_until_ready(&mut self, port: u16) -> Result<(), Refusal> {
        let deadline = Instant::now() + PATIENCE;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        loop {
            // Looked at first, so that the log below is whole when the process has ended.
            let ended = self.process.try_wait().ok().flatten();
            let said = since(&self.log, self.said_before);
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
                    PATIENCE.as_secs(),
                    why(&said)
                )));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_until_gone(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        while self.process.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() >= deadline {
                let said = since(&self.log, self.said_before);
                let patience = PATIENCE.as_secs();
                return Err(format!("the test broker still runs {patience} s after SIGTERM; it says:\n{}", why(&said)));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
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
pub(crate) enum Refusal {
    /// Another process took a port between our look and the broker's bind.
    PortTaken(String),
    /// Anything else.
    Ended(String),
}

impl Refusal {
    pub(crate) fn sentence(self) -> String {
        match self {
            Refusal::PortTaken(sentence) | Refusal::Ended(sentence) => sentence,
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Ended(format!("cannot prepare or start the test broker: {error}"))
    }
}

/// Starts again while another process takes a port: settings and data name the ports, so that others are another node.
pub(crate) fn with_free_ports<T>(mut start: impl FnMut() -> Result<T, Refusal>) -> Result<T, String> {
    for _ in 1..ATTEMPTS {
        match start() {
            Err(Refusal::PortTaken(_)) => {}
            other => return other.map_err(Refusal::sentence),
        }
    }
    start().map_err(Refusal::sentence)
}

/// Ports on 127.0.0.1 that were free a moment ago.
pub(crate) fn free_ports<const N: usize>() -> io::Result<[u16; N]> {
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(listeners::<N>()?) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// Listeners on 127.0.0.1, from below the range that Linux gives to outgoing connections.
///
/// `bind` to port 0 takes from that range. While a broker there is down, a client that tries to reconnect may be given
/// the broker's port as its own, connect to itself, and keep the broker from coming back.
pub(crate) fn listeners<const N: usize>() -> io::Result<[TcpListener; N]> {
    const TRIES: usize = 200;
    let mut held: Vec<TcpListener> = Vec::new();
    for _ in 0..TRIES {
        let [high, low] = random::<2>()?;
        let port = 20_000 + u16::from_be_bytes([high, low]) % 12_000;
        held.extend(TcpListener::bind(("127.0.0.1", port)));
        held = match held.try_into() {
            Ok(listeners) => return Ok(listeners),
            Err(fewer) => fewer,
        };
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "the ports 20000 to 31999 on 127.0.0.1 are in use"))
}

/// Settings of one node that is broker and controller, every internal topic with one replica.
fn alone([client, controller]: [u16; 2]) -> String {
    format!(
        "node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"
    )
}

/// The rest of server.properties, the same for every node.
///
/// A killed broker cannot register again before its last session has run out, so a restart takes that long at least:
/// 3 s with six heartbeats in it, where Kafka's own 9 s make the restart of a test 13 s long.
const COMMON: &str = "process.roles=broker,controller
controller.listener.names=CONTROLLER
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
share.coordinator.state.topic.num.partitions=4
log.cleaner.dedupe.buffer.size=16777216
";

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
pub(crate) fn jars() -> Result<PathBuf, String> {
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
pub(crate) fn cluster_id() -> io::Result<String> {
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
