//! Three real Kafka nodes on loopback, each broker and controller, each with a proxy before its clients' port.
//!
//! Takes what `kafka` takes and shares its `Node`; gives brokers that a test kills, stops, freezes and cuts off.
//! Clients are told the proxies' addresses, so that all they send passes there; what the nodes tell each other goes
//! direct. It leaves nothing behind. `GPUFLEET_KAFKA_BROKERS` does not matter: who does harm has brokers of their own.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use crate::kafka::{Node, Plan, Refusal, cluster_id, free_ports, jars, with_free_ports};
use crate::proxy::Proxy;

/// How many nodes there are.
const NODES: usize = 3;
/// How many of them elect a controller, without which no broker comes up.
const MAJORITY: usize = 2;
/// How long the brokers may take, once each is up, until each knows the others.
const MET_WITHIN: Duration = Duration::from_secs(30);
/// How long a broker may take to answer a question.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// The longest answer that is read: room for some hundred thousand partitions.
const ANSWER_BYTES: usize = 16 << 20;

/// Nodes 0, 1 and 2; the index of a broker here is its id in Kafka. Dropping it kills them and removes their data.
///
/// Topics name their own `min.insync.replicas`; one created without a replication factor has three replicas.
pub struct Cluster {
    nodes: Vec<Node>,
    proxies: Vec<Proxy>,
}

impl Cluster {
    /// Starts three nodes with empty data directories and waits until each is up and knows the others.
    ///
    /// # Errors
    /// A sentence that says what is missing and what to run, or why a broker ended, with the end of its log.
    pub fn start() -> Result<Cluster, String> {
        let lib = jars()?;
        let cluster = with_free_ports(|| {
            // Three ports for each node, in the order of `settings`.
            let ports = free_ports::<{ 3 * NODES }>()?;
            let ports: Vec<&[u16]> = ports.chunks(3).collect();
            let proxies: Vec<Proxy> =
                ports.iter().map(|own| Proxy::start(loopback(own[0]))).collect::<Result<_, _>>()?;
            let cluster_id = cluster_id()?;
            let spawned = |id: usize| {
                let own = settings(id, proxies[id].address(), &ports);
                let memory = ["-Xms128m", "-Xmx320m"];
                let plan = Plan { client: ports[id][0], own, quorum: &[], cluster_id: &cluster_id, memory };
                let mut node = Node::format(lib.clone(), &plan)?;
                node.spawn()?;
                Ok(node)
            };
            let nodes = thread::scope(|scope| {
                let threads: Vec<_> = (0..NODES).map(|id| scope.spawn(move || spawned(id))).collect();
                let nodes =
                    threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
                nodes.collect::<Vec<Result<Node, Refusal>>>()
            });
            let mut cluster = Cluster { nodes: nodes.into_iter().collect::<Result<_, _>>()?, proxies };
            cluster.wait_until_ready()?;
            Ok(cluster)
        })?;
        cluster.wait_until_whole(MET_WITHIN)?;
        Ok(cluster)
    }

    /// The proxies' addresses for `bootstrap.servers`; they stay the same.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        self.proxies.iter().map(|proxy| proxy.address().to_string()).collect::<Vec<_>>().join(",")
    }

    /// What stands between clients and this broker.
    #[must_use]
    pub fn proxy(&self, broker: usize) -> &Proxy {
        &self.proxies[broker]
    }

    /// Ends the node with SIGKILL and returns once it is gone. Its data stays; a dead one is left alone.
    pub fn kill(&mut self, broker: usize) {
        self.nodes[broker].kill();
    }

    /// Shuts the node down with SIGTERM, so that it hands over what it leads, and returns once it is gone.
    ///
    /// # Errors
    /// When it does not run, or does not end: it needs a controller, and so another node that runs.
    pub fn stop(&mut self, broker: usize) -> Result<(), String> {
        self.nodes[broker].stop()
    }

    /// Starts the node again with its ports and data, kills it first if it runs, and waits until it is up.
    ///
    /// Alone it cannot come up. It is started then, and the restart of a second node waits for both.
    ///
    /// # Errors
    /// As `start`.
    pub fn restart(&mut self, broker: usize) -> Result<(), String> {
        self.nodes[broker].spawn().and_then(|()| self.wait_until_ready()).map_err(Refusal::sentence)
    }

    /// Stops the node's process with SIGSTOP: its connections stay open and nothing answers.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self, broker: usize) -> Result<(), String> {
        self.nodes[broker].signal("STOP")
    }

    /// Lets a frozen node go on.
    ///
    /// # Errors
    /// When it does not run.
    pub fn thaw(&self, broker: usize) -> Result<(), String> {
        self.nodes[broker].signal("CONT")
    }

    /// Waits until each broker answers, knows the others, and sees every replica of every partition in sync.
    ///
    /// It asks the brokers directly, whatever the proxies do.
    ///
    /// # Errors
    /// What was missing last, when the time is over.
    pub fn wait_until_whole(&self, patience: Duration) -> Result<(), String> {
        let deadline = Instant::now() + patience;
        let lacks = |(id, node): (usize, &Node)| match lack(node.client) {
            Ok(lack) => lack.map(|lack| format!("broker {id} says: {lack}")),
            Err(error) => Some(format!("broker {id} does not answer: {error}")),
        };
        while let Some(lack) = self.nodes.iter().enumerate().find_map(lacks) {
            if Instant::now() >= deadline {
                return Err(format!("the test cluster is not whole after {} s: {lack}", patience.as_secs()));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Waits for every node that runs, where they are enough.
    fn wait_until_ready(&mut self) -> Result<(), Refusal> {
        if self.nodes.iter().filter(|node| node.running()).count() < MAJORITY {
            return Ok(());
        }
        self.nodes.iter_mut().try_for_each(Node::wait_until_ready)
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Settings of one node: `ports` are those of all nodes, each its clients', the other brokers' and the controllers'.
fn settings(id: usize, proxy: SocketAddr, ports: &[&[u16]]) -> String {
    let (client, broker, controller) = (ports[id][0], ports[id][1], ports[id][2]);
    let voters: Vec<String> = ports.iter().enumerate().map(|(id, own)| format!("{id}@127.0.0.1:{}", own[2])).collect();
    format!(
        "node.id={id}
controller.quorum.voters={voters}
listeners=CLIENT://127.0.0.1:{client},BROKER://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENT://{proxy},BROKER://127.0.0.1:{broker}
listener.security.protocol.map=CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=BROKER
default.replication.factor={NODES}
offsets.topic.replication.factor={NODES}
transaction.state.log.replication.factor={NODES}
transaction.state.log.min.isr=2
share.coordinator.state.topic.replication.factor={NODES}
share.coordinator.state.topic.min.isr=2
",
        voters = voters.join(",")
    )
}

/// What the cluster lacks in the eyes of one broker, if anything.
///
/// Asks with Metadata version 1, which has been the same since Kafka 0.10 (<https://kafka.apache.org/protocol>). A tool
/// from the jars would take two seconds of both cores for each look.
fn lack(port: u16) -> io::Result<Option<String>> {
    // Length, api key 3, version 1, correlation id, no client id, and no array of topics, which asks for all.
    const QUESTION: [u8; 18] = [0, 0, 0, 14, 0, 3, 0, 1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    let mut stream = TcpStream::connect_timeout(&loopback(port), ANSWER_WITHIN)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(&QUESTION)?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = usize::try_from(i32::from_be_bytes(length)).unwrap_or(usize::MAX).min(ANSWER_BYTES);
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer)?;
    let lacks = lacks_in(&mut Answer(&answer));
    let lacks = lacks.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its metadata ends early"))?;
    Ok(lacks.into_iter().next())
}

/// All that the cluster lacks by this answer; None when it ends early.
fn lacks_in(answer: &mut Answer) -> Option<Vec<String>> {
    let mut lacks = Vec::new();
    answer.int()?;
    let brokers = answer.int()?;
    for _ in 0..brokers {
        answer.int()?;
        answer.text()?;
        answer.int()?;
        answer.text()?;
    }
    answer.int()?;
    if usize::try_from(brokers) != Ok(NODES) {
        lacks.push(format!("of {NODES} brokers {brokers} are up"));
    }
    for _ in 0..answer.int()? {
        let topic_error = answer.short()?;
        let topic = answer.text()?;
        answer.take(1)?;
        for _ in 0..answer.int()? {
            let error = answer.short()?;
            let partition = answer.int()?;
            answer.int()?;
            let replicas = answer.ints()?;
            let in_sync = answer.ints()?;
            if error != 0 || in_sync < replicas {
                lacks.push(format!("{topic} {partition}: {in_sync} of {replicas} replicas in sync, error {error}"));
            }
        }
        if topic_error != 0 {
            lacks.push(format!("{topic}: error {topic_error}"));
        }
    }
    Some(lacks)
}

/// What is left of an answer, in the protocol's primitive types; each gives None when it is too short.
struct Answer<'a>(&'a [u8]);

impl<'a> Answer<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(bytes)?;
        self.0 = left;
        Some(taken)
    }

    fn short(&mut self) -> Option<i16> {
        self.take(2)?.try_into().ok().map(i16::from_be_bytes)
    }

    fn int(&mut self) -> Option<i32> {
        self.take(4)?.try_into().ok().map(i32::from_be_bytes)
    }

    /// A text that may be null, which reads as empty.
    fn text(&mut self) -> Option<String> {
        let bytes = usize::try_from(self.short()?).unwrap_or(0);
        Some(String::from_utf8_lossy(self.take(bytes)?).into_owned())
    }

    /// The length of an array of ints, which is skipped.
    fn ints(&mut self) -> Option<usize> {
        let length = usize::try_from(self.int()?).unwrap_or(0);
        self.take(4 * length)?;
        Some(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn answer_of_a_broker_tells_what_is_missing() {
        // One broker (7, host "h", port 9, no rack), controller 7, topic "t" with partition 5 on 7 and 8, 7 in sync.
        let answer =
            b"\0\0\0\0\0\0\0\x01\0\0\0\x07\0\x01h\0\0\0\x09\xff\xff\0\0\0\x07\0\0\0\x01\0\0\0\x01t\0\0\0\0\x01\
            \0\0\0\0\0\x05\0\0\0\x07\0\0\0\x02\0\0\0\x07\0\0\0\x08\0\0\0\x01\0\0\0\x07";
        assert_eq!(lacks_in(&mut Answer(answer)).unwrap()[0], "of 3 brokers 1 are up");
        let mut three = answer[..8].to_vec();
        three[7] = 3;
        (0..3).for_each(|_| three.extend(&answer[8..21]));
        three.extend(&answer[21..]);
        assert_eq!(lacks_in(&mut Answer(&three)).unwrap(), ["t 5: 1 of 2 replicas in sync, error 0"]);
        for end in 0..three.len() {
            assert_eq!(lacks_in(&mut Answer(&three[..end])), None, "{end}");
        }
    }

    #[test]
    fn brokers_that_are_killed_frozen_or_stopped_come_back_and_a_dropped_cluster_leaves_nothing() {
        let sure = |result: Result<(), String>| result.unwrap_or_else(|sentence| panic!("{sentence}"));
        let mut cluster = Cluster::start().unwrap_or_else(|sentence| panic!("{sentence}"));
        let addresses: Vec<SocketAddr> = cluster.bootstrap().split(',').map(|one| one.parse().unwrap()).collect();
        assert_eq!(addresses.len(), NODES);
        let says = |cluster: &Cluster| cluster.wait_until_whole(Duration::ZERO).unwrap_err();

        cluster.kill(0);
        assert!(says(&cluster).contains("broker 0 does not answer"));
        cluster.kill(1);
        sure(cluster.restart(0));
        sure(cluster.restart(1));
        sure(cluster.wait_until_whole(PATIENCE));

        sure(cluster.freeze(2));
        assert!(says(&cluster).contains("broker 2 does not answer"));
        sure(cluster.thaw(2));
        sure(cluster.wait_until_whole(PATIENCE));

        sure(cluster.stop(1));
        assert!(cluster.freeze(1).unwrap_err().contains("does not run"));
        sure(cluster.restart(1));
        sure(cluster.wait_until_whole(PATIENCE));

        let directories: Vec<_> = cluster.nodes.iter().map(|node| node.directory.path().to_owned()).collect();
        drop(cluster);
        assert!(addresses.iter().all(|address| TcpStream::connect(address).is_err()), "a dropped proxy listens");
        assert!(!directories.iter().any(|directory| directory.exists()), "a dropped broker left its directory");
    }
}
