//! Avro's binary primitives: writers that append to a buffer, and a bounded cursor that reads untrusted bytes.
//!
//! The cursor never panics and never allocates more than the bytes that are left could fill.

use super::DecodeError;

pub(crate) fn put_long(out: &mut Vec<u8>, value: i64) {
    let mut rest = ((value << 1) ^ (value >> 63)) as u64;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_long(out, bytes.len() as i64);
    out.extend_from_slice(bytes);
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_bytes(out, text.as_bytes());
}

pub(crate) fn put_double(out: &mut Vec<u8>, value: f64) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_bool(out: &mut Vec<u8>, value: bool) {
    out.push(u8::from(value));
}

/// Branch 0 for `None`, else branch 1 and the value.
pub(crate) fn put_optional<T>(out: &mut Vec<u8>, value: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    match value {
        None => out.push(0),
        Some(value) => {
            out.push(2);
            put(out, value);
        }
    }
}

/// One block with all items, then the end mark.
pub(crate) fn put_array<T>(out: &mut Vec<u8>, items: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    if !items.is_empty() {
        put_long(out, items.len() as i64);
        for item in items {
            put(out, item);
        }
    }
    out.push(0);
}

/// Differences between neighbours, the first from 0. Wraps, as the reader does, so that any values survive.
pub(crate) fn put_deltas(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = i64>) {
    if values.len() > 0 {
        put_long(out, values.len() as i64);
        let mut before = 0i64;
        for value in values {
            put_long(out, value.wrapping_sub(before));
            before = value;
        }
    }
    out.push(0);
}

/// No name and no kernel line is longer; an incident that quotes several stays below what a broker takes.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// Reads Avro primitives from untrusted bytes.
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }

    #[inline]
    pub(crate) fn byte(&mut self) -> Result<u8, DecodeError> {
        let (first, rest) = self.rest.split_first().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(*first)
    }

    #[inline]
    pub(crate) fn long(&mut self) -> Result<i64, DecodeError> {
        let first = self.byte()?;
        if first < 0x80 {
            let raw = u64::from(first);
            return Ok((raw >> 1) as i64 ^ -((raw & 1) as i64));
        }
        self.long_tail(u64::from(first & 0x7f))
    }

    fn long_tail(&mut self, mut raw: u64) -> Result<i64, DecodeError> {
        for shift in (7..64).step_by(7) {
            let byte = self.byte()?;
            raw |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                if shift == 63 && byte > 1 {
                    break;
                }
                return Ok((raw >> 1) as i64 ^ -((raw & 1) as i64));
            }
        }
        Err(DecodeError::Malformed("a number has more than 64 bits"))
    }

    pub(crate) fn int(&mut self) -> Result<i32, DecodeError> {
        i32::try_from(self.long()?).map_err(|_| DecodeError::Malformed("an int has more than 32 bits"))
    }

    pub(crate) fn boolean(&mut self) -> Result<bool, DecodeError> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Malformed("a boolean is neither 0 nor 1")),
        }
    }

    pub(crate) fn double(&mut self) -> Result<f64, DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<8>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(f64::from_le_bytes(*head))
    }

    pub(crate) fn float(&mut self) -> Result<f32, DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<4>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(f32::from_le_bytes(*head))
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(length).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = usize::try_from(self.long()?).map_err(|_| DecodeError::Malformed("a length is negative"))?;
        self.take(length)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, DecodeError> {
        let bytes = self.bytes()?;
        if bytes.len() > MAX_TEXT_BYTES {
            return Err(DecodeError::Malformed("a string is longer than 64 KiB"));
        }
        std::str::from_utf8(bytes).map_err(|_| DecodeError::Malformed("a string is not UTF-8"))
    }

    /// The item count of an array's or map's next block; 0 ends it. Every item takes at least a byte here
    /// (no record of ours has empty items), so a count beyond what is left is refused before anything is allocated.
    pub(crate) fn block(&mut self) -> Result<usize, DecodeError> {
        let count = self.long()?;
        if count < 0 {
            self.long()?; // the block's size in bytes, which a reader that wants the items does not need
        }
        let count = usize::try_from(count.unsigned_abs()).map_err(|_| DecodeError::Truncated)?;
        if count > self.remaining() {
            return Err(DecodeError::Truncated);
        }
        Ok(count)
    }
}
