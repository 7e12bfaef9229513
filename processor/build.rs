//! Names the version of the rules by their source: the code of the engine, the detectors and the contract.
//!
//! A snapshot is only continued by the very code that wrote it; any other takes it over (`src/worker.rs`).

use std::path::{Path, PathBuf};

fn files(folder: &Path, into: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files(&path, into)?;
        } else {
            into.push(path);
        }
    }
    Ok(())
}

fn main() -> std::io::Result<()> {
    let mut sources = Vec::new();
    for folder in ["src/engine", "src/detect", "../schemas/src", "../schemas/data"] {
        println!("cargo::rerun-if-changed={folder}");
        files(Path::new(folder), &mut sources)?;
    }
    sources.sort();
    // FNV-1a, 64 bits: it tells versions apart and defends against nobody.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for source in sources {
        for byte in std::fs::read(source)? {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=GPUFLEET_RULES={hash:016x}");
    Ok(())
}
