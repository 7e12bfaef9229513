//! How a program ends: exit codes, and an error that knows which one it means.

use std::process::ExitCode;

/// Whose fault an error is; each has its exit code (`docs/reference` of every program: `--help`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer is "unhealthy" or "not equal".
    Unhealthy,
    /// The command line is wrong.
    Usage,
    /// A configuration file, or what it names, is wrong.
    Config,
    /// Something outside failed: a broker, a disk, a file.
    External,
    /// Ours.
    Bug,
}

impl Fault {
    pub const fn code(self) -> u8 {
        match self {
            Fault::Unhealthy => 1,
            Fault::Usage => 2,
            Fault::Config => 3,
            Fault::External => 4,
            Fault::Bug => 70,
        }
    }
}

/// An error for a person: one sentence, and whose fault it is.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub fault: Fault,
    pub message: String,
}

impl Failure {
    pub fn new(fault: Fault, message: impl Into<String>) -> Failure {
        Failure { fault, message: message.into() }
    }

    pub fn external(message: impl Into<String>) -> Failure {
        Failure::new(Fault::External, message)
    }

    pub fn config(message: impl Into<String>) -> Failure {
        Failure::new(Fault::Config, message)
    }

    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Fault::Usage, message)
    }

    pub fn bug(message: impl Into<String>) -> Failure {
        Failure::new(Fault::Bug, message)
    }
}

/// Prints the error, if any, on stderr and gives the process's exit code.
pub fn finish(program: &str, result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{program}: {failure}");
            ExitCode::from(failure.fault.code())
        }
    }
}

/// Writes data for the next program. A reader that has gone away (a closed pipe) is success.
pub fn print(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::external(format!("cannot write to stdout: {error}"))),
        Ok(()) => Ok(()),
    }
}
