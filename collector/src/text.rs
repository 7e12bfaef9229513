//! Bytes of a recorded file to lines of text, in bounded memory.
//!
//! Takes any reader; gives one [`Line`] at a time: UTF-8 with or without a mark, UTF-16 with a mark (or little-endian
//! without one), either line end. Bytes that are no text are replaced and said so, NUL is dropped, and a line longer
//! than [`MAX_LINE_BYTES`] is cut and said so. It interprets nothing, and an encoding that changes in the middle of a
//! file is not followed.

use std::io::{BufRead, Chain, Cursor, Read, Result};

#[cfg(test)]
mod tests;

/// A line is cut here; the widest line of `nvidia-smi` is about 4 KiB.
pub const MAX_LINE_BYTES: usize = 64 * 1024;
/// How much of the head decides on the encoding.
const HEAD_BYTES: u64 = 64;

/// One line without its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    /// From 1.
    pub number: u64,
    /// Longer than [`MAX_LINE_BYTES`]; the rest was skipped.
    pub cut: bool,
    /// Bytes that are no text in the file's encoding were replaced.
    pub replaced: bool,
    /// A line end follows; only a file's last line can lack it.
    pub ended: bool,
}

#[derive(Clone, Copy, Debug)]
enum Encoding {
    Utf8,
    Utf16(fn([u8; 2]) -> u16),
}

/// The lines of a reader.
pub struct Lines<R> {
    input: Chain<Cursor<Vec<u8>>, R>,
    encoding: Encoding,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    /// Looks at the head of `input` for its encoding.
    pub fn new(mut input: R) -> Result<Lines<R>> {
        let mut head = Vec::new();
        input.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
        let (encoding, mark) = encoding(&head);
        head.drain(..mark);
        Ok(Lines { input: Cursor::new(head).chain(input), encoding, number: 0 })
    }

    /// The next line, or `None` at the end.
    #[expect(
        clippy::should_implement_trait,
        reason = "the error comes first here: `while let Some(line) = lines.next()?`"
    )]
    pub fn next(&mut self) -> Result<Option<Line>> {
        let line = match self.encoding {
            Encoding::Utf8 => self.next_utf8()?,
            Encoding::Utf16(unit) => self.next_utf16(unit)?,
        };
        Ok(line.map(|mut line| {
            self.number += 1;
            line.number = self.number;
            // Files that were put together have marks in the middle; crashed writers leave runs of NUL.
            if line.text.contains(['\0', '\u{feff}']) {
                line.text.retain(|c| c != '\0' && c != '\u{feff}');
            }
            line.text.truncate(line.text.trim_end_matches('\r').len());
            line
        }))
    }

    fn next_utf8(&mut self) -> Result<Option<Line>> {
        let mut bytes = Vec::new();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.input.by_ref().take(limit).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
        let mut ended = bytes.last() == Some(&b'\n');
        let cut = bytes.len() > MAX_LINE_BYTES && !ended;
        if ended {
            bytes.pop();
        } else if cut {
            bytes.truncate(MAX_LINE_BYTES);
            ended = self.skip_line()?;
            // The cut may have split a character, which is not the writer's fault.
            if let Err(error) = std::str::from_utf8(&bytes)
                && error.error_len().is_none()
            {
                bytes.truncate(error.valid_up_to());
            }
        }
        let (text, replaced) = match String::from_utf8(bytes) {
            Ok(text) => (text, false),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), true),
        };
        Ok(Some(Line { text, number: 0, cut, replaced, ended }))
    }

    /// Skips the rest of a line; says whether it ended.
    fn skip_line(&mut self) -> Result<bool> {
        loop {
            let buffer = self.input.fill_buf()?;
            if buffer.is_empty() {
                return Ok(false);
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(buffer.len(), |end| end + 1);
            self.input.consume(used);
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    fn next_utf16(&mut self, unit: fn([u8; 2]) -> u16) -> Result<Option<Line>> {
        let mut units = Vec::new();
        let (mut half, mut read, mut cut, mut ended) = (None, false, false, false);
        while !ended {
            let buffer = self.input.fill_buf()?;
            if buffer.is_empty() {
                break;
            }
            read = true;
            let mut used = 0;
            for byte in buffer {
                used += 1;
                let Some(first) = half.take() else {
                    half = Some(*byte);
                    continue;
                };
                match unit([first, *byte]) {
                    0x0a => {
                        ended = true;
                        break;
                    }
                    _ if units.len() >= MAX_LINE_BYTES / 2 => cut = true,
                    unit => units.push(unit),
                }
            }
            self.input.consume(used);
        }
        let mut replaced = half.is_some();
        let text = char::decode_utf16(units)
            .map(|c| {
                c.unwrap_or_else(|_| {
                    replaced = true;
                    char::REPLACEMENT_CHARACTER
                })
            })
            .collect();
        Ok(read.then_some(Line { text, number: 0, cut, replaced, ended }))
    }
}

/// The encoding that a file's head tells, and the length of its mark.
fn encoding(head: &[u8]) -> (Encoding, usize) {
    match head {
        [0xff, 0xfe, ..] => (Encoding::Utf16(u16::from_le_bytes), 2),
        [0xfe, 0xff, ..] => (Encoding::Utf16(u16::from_be_bytes), 2),
        [0xef, 0xbb, 0xbf, ..] => (Encoding::Utf8, 3),
        _ if head.len() >= 4 && head.chunks_exact(2).all(|pair| pair[0] != 0 && pair[1] == 0) => {
            (Encoding::Utf16(u16::from_le_bytes), 0)
        }
        _ => (Encoding::Utf8, 0),
    }
}
