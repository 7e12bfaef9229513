//! Which partition a host's records go to.
//!
//! Producers set the partition themselves, so that every client library agrees: murmur2 as Kafka's Java client
//! computes it (`org.apache.kafka.common.utils.Utils.murmur2`), made positive, modulo the partition count.

/// The partition of `key` among `count` partitions; 0 when `count` is not positive.
pub fn partition_of(key: &str, count: i32) -> i32 {
    if count <= 0 {
        return 0;
    }
    (murmur2(key.as_bytes()) & 0x7fff_ffff) as i32 % count
}

fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c_u32 ^ data.len() as u32;
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let mut k = u32::from_le_bytes([word[0], word[1], word[2], word[3]]).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        for (i, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * i);
        }
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from Kafka's own UtilsTest.testMurmur2.
    #[test]
    fn murmur2_agrees_with_kafkas_java_client() {
        for (key, hash) in [
            ("21", -973_932_308_i32),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()) as i32, hash, "{key}");
        }
    }

    #[test]
    fn every_host_has_a_partition_in_range() {
        for count in 1..9 {
            for host in 0..100 {
                assert!((0..count).contains(&partition_of(&format!("host-{host}"), count)));
            }
        }
        assert_eq!(partition_of("host", 0), 0);
    }
}
