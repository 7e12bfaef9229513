//! `gpufleet-processor detect` as a process that tests start, stop, freeze and kill.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::log::Log;
use crate::programs::program;

/// A running detection. Dropping it kills it.
pub struct Detection {
    process: Child,
}

impl Detection {
    /// Starts one on `log`, its snapshots in `folder`; it runs until it is stopped, or until the log is idle.
    pub fn start(log: &Log, folder: &Path, more: &[&str], failpoint: Option<&str>) -> Detection {
        let mut command = Command::new(program("gpufleet-processor"));
        let until_idle = failpoint.is_some() || more.contains(&"--until-idle");
        let arguments: Vec<String> = log.arguments();
        let arguments = if until_idle { &arguments[..] } else { &arguments[..arguments.len() - 2] };
        command.arg("detect").args(arguments).args(log.detect_arguments(folder));
        command.args(more.iter().filter(|argument| **argument != "--until-idle"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env("TZ", "Pacific/Kiritimati").env("GPUFLEET_LOG", "warn").env_remove("GPUFLEET_FAILPOINT");
        if let Some(failpoint) = failpoint {
            command.env("GPUFLEET_FAILPOINT", failpoint);
        }
        Detection { process: command.spawn().expect("the processor starts") }
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().expect("kill runs");
        assert!(sent.success(), "SIG{name} was not sent");
    }

    /// Kills it as `kill -9` does.
    pub fn kill(mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("ended");
    }

    /// Asks it to end and waits; gives how long that took.
    pub fn stop(self) -> Duration {
        let start = Instant::now();
        self.signal("TERM");
        self.wait_for_success();
        start.elapsed()
    }

    /// Waits until it ends by itself, in good order.
    pub fn wait_for_success(self) {
        let (code, signal, said) = self.wait();
        assert_eq!((code, signal), (Some(0), None), "detect: {said}");
    }

    /// Waits until it ends; gives its exit code, or the signal that ended it, and what it said.
    pub fn wait(mut self) -> (Option<i32>, Option<i32>, String) {
        let mut said = String::new();
        if let Some(stderr) = &mut self.process.stderr {
            let _ = std::io::Read::read_to_string(stderr, &mut said);
        }
        let status = self.process.wait().expect("ended");
        (status.code(), status.signal(), said)
    }

    /// Memory that it holds.
    pub fn resident_kilobytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()).and_then(|kb| kb.parse().ok()).unwrap_or(0)
    }

    pub fn runs(&mut self) -> bool {
        self.process.try_wait().expect("known").is_none()
    }
}

impl Drop for Detection {
    fn drop(&mut self) {
        // Fails when it has ended, which is all that matters.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
