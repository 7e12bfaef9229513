//! Places where a test kills the process, to prove that nothing is lost or doubled there.
//!
//! `GPUFLEET_FAILPOINT=<name>[:<n>]=<file>` makes the process write `<file>` and then kill itself, as `kill -9` would,
//! when it reaches the point `<name>` for the `n`-th time (the first by default). Without the variable a point costs
//! one comparison. Nothing else reads or sets it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

struct Armed {
    name: String,
    nth: u64,
    proof: String,
    reached: AtomicU64,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

fn parse(text: &str) -> Option<Armed> {
    let (point, proof) = text.split_once('=')?;
    let (name, nth) = match point.split_once(':') {
        Some((name, nth)) => (name, nth.parse().ok()?),
        None => (point, 1),
    };
    Some(Armed { name: name.to_owned(), nth, proof: proof.to_owned(), reached: AtomicU64::new(0) })
}

/// Marks a place at which a test may kill the process.
pub fn reached(name: &str) {
    let armed = ARMED.get_or_init(|| std::env::var("GPUFLEET_FAILPOINT").ok().as_deref().and_then(parse));
    let Some(armed) = armed.as_ref().filter(|armed| armed.name == name) else { return };
    if armed.reached.fetch_add(1, Ordering::SeqCst) + 1 == armed.nth {
        let proof = std::fs::write(&armed.proof, name);
        eprintln!("failpoint {name} reached, proof {proof:?}: killing this process");
        // SIGKILL leaves no destructor, flush or handler a chance, and needs no unsafe code this way.
        let _ = std::process::Command::new("kill").arg("-9").arg(std::process::id().to_string()).status();
        std::thread::sleep(std::time::Duration::from_secs(60));
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_named_with_its_count_and_its_proof() {
        let armed = parse("archive.before_upload:3=/tmp/proof").expect("parses");
        assert_eq!((armed.name.as_str(), armed.nth, armed.proof.as_str()), ("archive.before_upload", 3, "/tmp/proof"));
        assert_eq!(parse("a=b").expect("parses").nth, 1);
        assert!(parse("archive.before_upload").is_none());
    }
}
