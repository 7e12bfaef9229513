//! A TCP proxy for fault tests: cuts, delays, slows or swallows what passes between a client and its server.
//!
//! Takes the server's address and gives one on loopback that stands for it; the fault changes while connections are
//! open. It knows nothing of what passes, and its faults depend on time and bytes alone, never on chance.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use crate::kafka::listeners;

/// How many bytes are read at once.
const CHUNK_BYTES: usize = 16 * 1024;
/// How many chunks wait in one direction of a connection (4 MiB) before its sender does.
const CHUNKS: usize = 256;
/// How long a connection to the server may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// A slow connection passes its bytes in so many pieces a second.
const PIECES_PER_SECOND: u64 = 50;
/// How long `set` waits for the port to open or close: a backstop, for it takes a millisecond.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);

/// What happens to the bytes that pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// They pass.
    None,
    /// New connections are refused, and present ones end.
    Cut,
    /// Connections open and stay, and nothing passes in either direction, not even an end. It waits, and is not lost.
    HalfOpen,
    /// What the client sends passes, what the server answers waits.
    OneWay,
    /// Each chunk passes so much later, in order.
    Delay(Duration),
    /// Each direction of a connection passes so many bytes a second at most.
    Slow {
        /// 1 at least.
        bytes_per_second: u64,
    },
    /// A connection ends once so many bytes have passed under this fault, both directions together.
    Reset {
        /// The bytes before the end; the rest of what was sent is lost.
        every_bytes: u64,
    },
}

/// A proxy that runs. Dropping it ends its connections and its threads.
///
/// `Cut` and `Reset` end a connection with FIN, and answer with RST only what a peer sends after that: std has no
/// stable way to set `SO_LINGER`. A Kafka client takes both for a disconnect.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free loopback port, one that no outgoing connection is given.
    ///
    /// # Errors
    /// When there is no such port.
    pub fn start(target: SocketAddr) -> io::Result<Proxy> {
        let [listener] = listeners()?;
        Proxy::run(listener, target)
    }

    /// Listens on a given loopback port.
    ///
    /// # Errors
    /// When the port is in use.
    pub fn start_at(port: u16, target: SocketAddr) -> io::Result<Proxy> {
        Proxy::run(TcpListener::bind(("127.0.0.1", port))?, target)
    }

    fn run(listener: TcpListener, target: SocketAddr) -> io::Result<Proxy> {
        let address = listener.local_addr()?;
        let state = State { fault: Fault::None, stopping: false, listening: true, connections: Vec::new() };
        let shared = Arc::new(Shared { address, target, state: Mutex::new(state), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        let thread = thread::spawn(move || thread::scope(|scope| accepting.accept(scope, listener)));
        Ok(Proxy { address, shared, thread: Some(thread) })
    }

    /// Where clients connect; the same under every fault.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the fault, for present and new connections. Once it returns, a cut port refuses and any other listens.
    pub fn set(&self, fault: Fault) {
        self.shared.change(|state| state.fault = fault);
        let unsettled = |state: &mut State| state.listening == (state.fault == Fault::Cut);
        drop(self.shared.changed.wait_timeout_while(self.shared.lock(), SETTLED_WITHIN, unsettled));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.change(|state| state.stopping = true);
        if let Some(thread) = self.thread.take() {
            // It fails only when the thread panicked, which has told its reason.
            let _ = thread.join();
        }
    }
}

struct Shared {
    address: SocketAddr,
    target: SocketAddr,
    state: Mutex<State>,
    /// Notified with each change of the state.
    changed: Condvar,
}

struct State {
    fault: Fault,
    stopping: bool,
    /// Whether the port is open; follows the fault.
    listening: bool,
    /// Those that have ended are forgotten when the next one opens.
    connections: Vec<Weak<Connection>>,
}

impl State {
    /// Whether connections must end.
    fn closed(&self) -> bool {
        self.stopping || self.fault == Fault::Cut
    }
}

struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// Bytes that passed under `Fault::Reset`.
    passed: AtomicU64,
}

impl Connection {
    /// Ends it in both directions, which wakes every thread that reads or writes there.
    fn end(&self) {
        for stream in [&self.client, &self.server] {
            // It fails when the stream has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    ToServer,
    ToClient,
}

/// What was read and when; nothing is the end of the stream.
type Chunk = (Instant, Vec<u8>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let closed = state.closed();
        if closed {
            state.connections.drain(..).filter_map(|connection| connection.upgrade()).for_each(|each| each.end());
        }
        drop(state);
        self.changed.notify_all();
        if closed {
            // Wakes `accept`, which looks at the state after each connection. It is refused where the port is closed.
            let _ = TcpStream::connect(self.address);
        }
    }

    /// Serves connections, on threads of the scope, until the proxy stops.
    fn accept<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: TcpListener) {
        let mut listener = Some(listener);
        loop {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            if state.fault == Fault::Cut {
                listener = None;
                state.listening = false;
                self.changed.notify_all();
                drop(self.changed.wait_while(state, |state| !state.stopping && state.fault == Fault::Cut));
                continue;
            }
            let Some(open) = &listener else {
                // Another process may have the port for a moment.
                match TcpListener::bind(self.address) {
                    Ok(again) => listener = Some(again),
                    Err(_) => drop(self.changed.wait_timeout(state, Duration::from_millis(10))),
                }
                continue;
            };
            state.listening = true;
            self.changed.notify_all();
            drop(state);
            match open.accept() {
                Ok((client, _)) => drop(scope.spawn(move || self.serve(client))),
                // No descriptors left, or a client that went away: neither ends the proxy.
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn serve(&self, client: TcpStream) {
        let waits = |state: &mut State| !state.stopping && state.fault == Fault::HalfOpen;
        if self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner).closed() {
            return;
        }
        // A client of a server that is down is accepted and closed at once.
        let Ok(server) = TcpStream::connect_timeout(&self.target, CONNECT_WITHIN) else { return };
        if client.set_nodelay(true).and(server.set_nodelay(true)).is_err() {
            return;
        }
        let connection = Arc::new(Connection { client, server, passed: AtomicU64::new(0) });
        let mut state = self.lock();
        if state.closed() {
            return;
        }
        state.connections.retain(|connection| connection.strong_count() > 0);
        state.connections.push(Arc::downgrade(&connection));
        drop(state);
        thread::scope(|scope| {
            for (way, from) in [(Way::ToServer, &connection.client), (Way::ToClient, &connection.server)] {
                let (sender, chunks) = sync_channel(CHUNKS);
                let connection = &connection;
                scope.spawn(move || read(from, &sender));
                scope.spawn(move || self.write(connection, way, &chunks));
            }
        });
    }

    /// Passes what was read, as the fault allows, until the stream or the connection ends.
    fn write(&self, connection: &Connection, way: Way, chunks: &Receiver<Chunk>) {
        let mut to = if way == Way::ToServer { &connection.server } else { &connection.client };
        let mut free_at = Instant::now();
        for (read_at, chunk) in chunks {
            let mut rest = &chunk[..];
            loop {
                let Some(allowed) = self.allowance(connection, way, read_at, rest.len(), &mut free_at) else {
                    return connection.end();
                };
                let (piece, later) = rest.split_at(allowed);
                if to.write_all(piece).is_err() {
                    return connection.end();
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            if chunk.is_empty() {
                // The other direction goes on: it fails only when that has ended too.
                let _ = to.shutdown(Shutdown::Write);
            }
        }
    }

    /// Waits until some of `bytes` may pass, and says how many. None ends the connection.
    fn allowance(
        &self,
        connection: &Connection,
        way: Way,
        read_at: Instant,
        bytes: usize,
        free_at: &mut Instant,
    ) -> Option<usize> {
        let mut state = self.lock();
        while !state.closed() {
            let now = Instant::now();
            let until = match state.fault {
                Fault::HalfOpen => None,
                Fault::OneWay if way == Way::ToClient => None,
                Fault::Delay(delay) => Some(read_at + delay),
                Fault::Slow { bytes_per_second } if *free_at <= now => {
                    let rate = bytes_per_second.max(1);
                    let piece = bytes.min(usize::try_from(rate.div_ceil(PIECES_PER_SECOND)).unwrap_or(usize::MAX));
                    *free_at = now + Duration::from_nanos(1_000_000_000 * piece as u64 / rate);
                    return Some(piece);
                }
                Fault::Slow { .. } => Some(*free_at),
                Fault::Reset { every_bytes } => {
                    let left = every_bytes.saturating_sub(connection.passed.load(Ordering::Relaxed));
                    let piece = bytes.min(usize::try_from(left).unwrap_or(usize::MAX));
                    connection.passed.fetch_add(piece as u64, Ordering::Relaxed);
                    return (left > 0).then_some(piece);
                }
                Fault::None | Fault::OneWay | Fault::Cut => Some(now),
            };
            state = match until {
                Some(until) if until <= now => return Some(bytes),
                Some(until) => self.changed.wait_timeout(state, until - now).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        None
    }
}

/// Reads until the stream ends, or nobody writes any more.
fn read(mut from: &TcpStream, chunks: &SyncSender<Chunk>) {
    let mut buffer = [0; CHUNK_BYTES];
    loop {
        // A stream that breaks ends like one that is closed.
        let bytes = from.read(&mut buffer).unwrap_or(0);
        if chunks.send((Instant::now(), buffer[..bytes].to_vec())).is_err() || bytes == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Duration = Duration::from_millis(150);
    const PATIENCE: Duration = Duration::from_secs(5);

    /// A server that sends back what it gets. Its threads end with the test process.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || io::copy(&mut &stream, &mut &stream));
            }
        });
        address
    }

    /// A proxy before an echo server, and a client that an answer has reached.
    fn connected() -> (Proxy, TcpStream) {
        let proxy = Proxy::start(echo()).unwrap();
        let mut client = connect(&proxy);
        assert_eq!(ask(&mut client, b"first"), b"first");
        (proxy, client)
    }

    fn connect(proxy: &Proxy) -> TcpStream {
        let client = TcpStream::connect(proxy.address()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client
    }

    fn ask(client: &mut TcpStream, question: &[u8]) -> Vec<u8> {
        client.write_all(question).unwrap();
        let mut answer = vec![0; question.len()];
        client.read_exact(&mut answer).unwrap();
        answer
    }

    fn silent(client: &mut TcpStream) -> bool {
        client.set_read_timeout(Some(QUIET)).unwrap();
        let got = client.read(&mut [0; 16]);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(got, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// What is left to read before the connection ends, in whichever way.
    fn rest(client: &mut TcpStream) -> Vec<u8> {
        let mut rest = Vec::new();
        match client.read_to_end(&mut rest) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!("the connection is open: {error}"),
            _ => rest,
        }
    }

    #[test]
    fn without_a_fault_many_bytes_and_the_end_pass() {
        let (_proxy, mut client) = connected();
        let question: Vec<u8> = (0..2_000_000_u32).map(|at| (at % 251) as u8).collect();
        let mut sender = client.try_clone().unwrap();
        let sent = question.clone();
        let sending = thread::spawn(move || {
            sender.write_all(&sent).unwrap();
            sender.shutdown(Shutdown::Write).unwrap();
        });
        assert!(rest(&mut client) == question);
        sending.join().unwrap();
    }

    #[test]
    fn cut_ends_present_connections_and_refuses_new_ones_until_it_is_healed() {
        let (proxy, mut client) = connected();
        for _ in 0..3 {
            proxy.set(Fault::Cut);
            assert_eq!(rest(&mut client), b"");
            assert_eq!(TcpStream::connect(proxy.address()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
            proxy.set(Fault::None);
            client = connect(&proxy);
            assert_eq!(ask(&mut client, b"again"), b"again");
        }
    }

    #[test]
    fn half_open_keeps_old_and_new_connections_silent_and_loses_nothing() {
        let (proxy, mut old) = connected();
        proxy.set(Fault::HalfOpen);
        let mut new = connect(&proxy);
        for client in [&mut old, &mut new] {
            client.write_all(b"waits").unwrap();
            assert!(silent(client));
        }
        proxy.set(Fault::None);
        for client in [&mut old, &mut new] {
            assert_eq!(ask(client, b"!"), b"w");
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(rest(client), b"aits!");
        }
    }

    #[test]
    fn one_way_passes_questions_and_holds_answers() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(server.local_addr().unwrap()).unwrap();
        proxy.set(Fault::OneWay);
        let mut client = connect(&proxy);
        client.write_all(b"question").unwrap();
        let (mut server, _) = server.accept().unwrap();
        let mut question = [0; 8];
        server.read_exact(&mut question).unwrap();
        assert_eq!(&question, b"question");
        server.write_all(b"answer").unwrap();
        drop(server);
        assert!(silent(&mut client), "an answer or an end passed");
        proxy.set(Fault::None);
        assert_eq!(rest(&mut client), b"answer");
    }

    #[test]
    fn delay_holds_each_chunk_in_order_and_a_shorter_one_lets_it_go() {
        let (proxy, mut client) = connected();
        proxy.set(Fault::Delay(QUIET));
        let asked_at = Instant::now();
        client.write_all(b"1").unwrap();
        thread::sleep(Duration::from_millis(10));
        assert_eq!(ask(&mut client, b"2"), b"1");
        let took = asked_at.elapsed();
        assert!(took >= 2 * QUIET && took < 4 * QUIET, "{took:?}");
        assert_eq!(ask(&mut client, b"3"), b"2");
        proxy.set(Fault::Delay(Duration::from_secs(60)));
        assert!(silent(&mut client) || silent(&mut client));
        client.write_all(b"4").unwrap();
        assert!(silent(&mut client));
        let healed_at = Instant::now();
        proxy.set(Fault::None);
        client.read_exact(&mut [0]).unwrap();
        assert!(healed_at.elapsed() < QUIET);
    }

    #[test]
    fn slow_passes_so_many_bytes_a_second() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(server.local_addr().unwrap()).unwrap();
        proxy.set(Fault::Slow { bytes_per_second: 10_000 });
        let mut client = connect(&proxy);
        let sent_at = Instant::now();
        client.write_all(&[7; 5_000]).unwrap();
        server.accept().unwrap().0.read_exact(&mut [0; 5_000]).unwrap();
        let took = sent_at.elapsed();
        assert!(took >= Duration::from_millis(450) && took < Duration::from_millis(1_500), "{took:?}");
    }

    #[test]
    fn reset_ends_each_connection_after_so_many_bytes() {
        let (proxy, mut old) = connected();
        proxy.set(Fault::Reset { every_bytes: 8 });
        for mut client in [connect(&proxy), connect(&proxy)] {
            assert_eq!(ask(&mut client, b"abc"), b"abc");
            client.write_all(b"defghi").unwrap();
            assert_eq!(rest(&mut client), b"");
        }
        assert_eq!(ask(&mut old, b"abcd"), b"abcd");
        old.write_all(b"e").unwrap();
        assert_eq!(rest(&mut old), b"");
    }

    #[test]
    fn server_that_is_down_ends_connections_and_a_new_one_is_reached() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = server.local_addr().unwrap();
        let proxy = Proxy::start(target).unwrap();
        drop(server);
        assert_eq!(rest(&mut connect(&proxy)), b"");
        let server = TcpListener::bind(target).unwrap();
        let _client = connect(&proxy);
        server.accept().unwrap();
    }

    #[test]
    fn dropped_proxy_ends_connections_under_every_fault_and_frees_its_port() {
        for fault in [Fault::None, Fault::Cut, Fault::HalfOpen, Fault::Delay(Duration::from_secs(60))] {
            let (proxy, mut client) = connected();
            let address = proxy.address();
            proxy.set(fault);
            // A write to a connection that was cut may fail.
            let _ = client.write_all(b"waits");
            drop(proxy);
            assert_eq!(rest(&mut client), b"");
            assert!(TcpStream::connect(address).is_err());
            drop(Proxy::start_at(address.port(), echo()).unwrap());
        }
    }
}
