//! A snapshot: the state of a task after every record before an offset, as bytes that can be checked.
//!
//! The same task, version and offset give the same bytes, whoever writes them; that is what makes a zombie harmless and
//! a difference an alarm. The last record before the offset is remembered by its hash, so that a topic that was deleted
//! and made anew is noticed.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::Section;

const MAGIC: &[u8; 8] = b"gpufleet";
const SUM_BYTES: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub task: String,
    pub version: String,
    /// Everything before this offset is in the state.
    pub next_offset: i64,
    /// Hash of the record at `next_offset - 1`; none where no record came before.
    pub last_record: Option<u64>,
    pub sections: Vec<Section>,
}

/// Identity of a record's bytes.
pub fn hash_of(payload: &[u8]) -> u64 {
    let sum = Sha256::digest(payload);
    sum[..8].iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

impl Snapshot {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(postcard::to_allocvec(self).unwrap_or_default());
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        bytes
    }

    /// Reads a snapshot back; says what is wrong with bytes that are none, or were damaged.
    pub fn decode(bytes: &[u8]) -> Result<Snapshot, String> {
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>().ok_or("it is cut short")?;
        if Sha256::digest(body)[..] != sum[..] {
            return Err("its checksum does not fit".to_owned());
        }
        let state = body.strip_prefix(MAGIC).ok_or("it is no snapshot of gpufleet")?;
        postcard::from_bytes(state).map_err(|error| format!("it cannot be read: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_survives_and_every_damaged_byte_is_noticed() {
        let snapshot = Snapshot {
            task: "log/gpu.telemetry/3".into(),
            version: "v".into(),
            next_offset: 17,
            last_record: Some(hash_of(b"record")),
            sections: vec![Section::of("book", 1, &vec![1u8, 2, 3])],
        };
        let bytes = snapshot.encode();
        assert_eq!(Snapshot::decode(&bytes).expect("decodes"), snapshot);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Snapshot::decode(&damaged).is_err(), "byte {at}");
            assert!(Snapshot::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
    }
}
