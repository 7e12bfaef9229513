//! The programs as people run them: where they lie, and running one with a deadline.
//!
//! Takes the built programs beside the running test binary, gives exit status and output as text. It builds nothing:
//! a test that finds no program says what to run. It judges nothing.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a program may take before it is killed.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// What a caller's shell may have set and a test must not see.
const FOREIGN: [&str; 4] = ["GPUFLEET_LAKE", "GPUFLEET_BROKERS", "GPUFLEET_LOG", "GPUFLEET_FAILPOINT"];

/// How a program ended, and what it said.
#[derive(Clone, Debug)]
pub struct Output {
    /// The exit code; 128 and the signal when a signal ended it, as a shell has it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit code {}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

/// The built program of this name.
///
/// # Panics
/// When it is not built.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = folder().join(name);
    assert!(
        path.is_file(),
        "{} is missing; build first: cargo build --release --workspace --bins, or tests/run",
        path.display()
    );
    path
}

/// Where the programs lie: the test binary is `deps/suite-*` below it.
///
/// # Panics
/// When the running binary has no path.
#[must_use]
pub fn folder() -> PathBuf {
    let binary = env::current_exe().expect("a running test binary has a path");
    let folder = binary.parent().expect("a file has a folder");
    match folder.file_name() {
        Some(name) if name == "deps" => folder.parent().expect("deps lies in the profile's folder").to_owned(),
        _ => folder.to_owned(),
    }
}

/// The root of the repository.
///
/// # Panics
/// When the folder that this crate was compiled in is gone.
#[must_use]
pub fn workspace() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.join("..").canonicalize().expect("the tests run where they were compiled")
}

/// The folder with the shared cases, where there is one.
#[must_use]
pub fn shared() -> Option<PathBuf> {
    let named = env::var_os("GPUFLEET_SHARED").filter(|value| !value.is_empty()).map(PathBuf::from);
    let shared = named.unwrap_or_else(|| workspace().join("../shared"));
    if shared.is_dir() {
        return Some(shared);
    }
    eprintln!("skipped: ../shared is missing");
    None
}

/// The Python that has the packages of `tests/python/requirements.txt`.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn python() -> PathBuf {
    let named = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(python) = named("GPUFLEET_PYTHON") {
        return python;
    }
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache"))).unwrap_or_default();
    let python = cache.join("gpufleet/python/bin/python");
    assert!(
        python.is_file(),
        "{} is missing; run tests/run, or set GPUFLEET_PYTHON to a Python with tests/python/requirements.txt",
        python.display()
    );
    python
}

/// Runs a program in `dir` until it ends. A name with `gpufleet` in front is ours; others are looked up on `PATH`.
///
/// # Panics
/// As [`finish`].
pub fn run(program: &str, args: &[&str], dir: &Path) -> Output {
    finish(command(program, args, dir), DEADLINE)
}

/// The command that [`run`] runs, to add to.
///
/// # Panics
/// When one of our programs is not built.
pub fn command(name: &str, args: &[&str], dir: &Path) -> Command {
    let path = if name.starts_with("gpufleet") { program(name) } else { PathBuf::from(name) };
    let mut command = Command::new(path);
    command.args(args).current_dir(dir);
    for variable in FOREIGN {
        command.env_remove(variable);
    }
    command
}

/// Runs a command with no input and waits for it and for its output to end.
///
/// # Panics
/// When it cannot start, and when the deadline passes: everything that it started is killed then, and what it said is
/// shown.
pub fn finish(mut command: Command, deadline: Duration) -> Output {
    let until = Instant::now() + deadline;
    // A group of its own, so that what a shell started is killed with it.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let stdout = Reader::start(child.stdout.take().expect("stdout is piped"));
    let stderr = Reader::start(child.stderr.take().expect("stderr is piped"));
    loop {
        let status = child.try_wait().expect("our own child can be waited for");
        if let Some(status) = status.filter(|_| stdout.ended() && stderr.ended()) {
            let code = status.code().or_else(|| Some(128 + status.signal()?)).expect("ended by itself or by a signal");
            return Output { code, stdout: stdout.text(), stderr: stderr.text() };
        }
        if Instant::now() >= until {
            kill(&mut child);
            panic!(
                "{command:?} ran longer than {} s and was killed; it said until then:\n--- stdout\n{}\n--- stderr\n{}",
                deadline.as_secs(),
                stdout.text(),
                stderr.text()
            );
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn kill(child: &mut Child) {
    // Each of these fails only when there is nothing left to end.
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args([OsStr::new("-KILL"), OsStr::new("--"), OsStr::new(&group)]).status();
    let _ = child.kill();
    let _ = child.wait();
}

/// Takes what comes out of a pipe, so that it is there when the deadline passes.
struct Reader {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Reader {
    fn start(mut pipe: impl Read + Send + 'static) -> Reader {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&bytes);
        let thread = thread::spawn(move || {
            let mut chunk = [0; 8192];
            while let Ok(length @ 1..) = pipe.read(&mut chunk) {
                into.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&chunk[..length]);
            }
        });
        Reader { bytes, thread }
    }

    fn ended(&self) -> bool {
        self.thread.is_finished()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_with_its_code_and_all_that_was_said() {
        let output = run("sh", &["-c", "echo data; echo talk >&2; exit 3"], Path::new("/"));
        assert_eq!((output.code, output.stdout.as_str(), output.stderr.as_str()), (3, "data\n", "talk\n"));
        assert_eq!(run("sh", &["-c", "kill -9 $$"], Path::new("/")).code, 137);
    }

    #[test]
    #[should_panic(expected = "was killed; it said until then:\n--- stdout\nso far")]
    fn what_runs_past_the_deadline_is_killed_with_what_it_started() {
        // The outer shell is gone at once; what holds the pipe is its child.
        finish(command("sh", &["-c", "echo so far; sleep 600 &"], Path::new("/")), Duration::from_secs(1));
    }
}
