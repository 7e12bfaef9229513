//! Which kinds come of one cause: one cause, one page.
//!
//! Of findings of the same GPU and cause that lie within `engine.cause_window` the first is the page, and the others are
//! attached to it (`engine/book.rs`).

/// A memory error is reported by the driver as Xid (48 uncorrectable; 94 and 95 contained and not; 63 and 64 the
/// remapping of the row, and its failure) and by the ECC counters (NVIDIA's GPU memory error management guide).
const MEMORY_XIDS: [i32; 5] = [48, 63, 64, 94, 95];

/// What causes a finding of this kind and code, where several kinds have one cause.
pub fn cause(kind: &str, code: Option<i32>) -> Option<&'static str> {
    match (kind, code) {
        ("ecc_uncorrectable", _) => Some("memory"),
        ("xid", Some(code)) if MEMORY_XIDS.contains(&code) => Some("memory"),
        _ => None,
    }
}
