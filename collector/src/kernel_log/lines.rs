//! Lines of any length and encoding in bounded memory: UTF-8 or what claims to be, or UTF-16 with its mark.

use std::io::{BufRead, Chain, Cursor, ErrorKind, Read, Result};

/// A line is cut here; the kernel's own limit is about 1 KiB, the journal's default 48 KiB.
pub const MAX_LINE_BYTES: usize = 64 * 1024;

#[derive(Clone, Copy)]
enum Encoding {
    Utf8,
    Utf16(fn([u8; 2]) -> u16),
}

pub(super) struct Lines<R> {
    input: Chain<Cursor<Vec<u8>>, R>,
    encoding: Encoding,
    bytes: Vec<u8>,
}

/// One line without its end; NUL, which crashed writers leave in runs, is gone.
pub(super) struct Line {
    pub(super) text: String,
    pub(super) cut: bool,
    pub(super) replaced: bool,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(mut input: R) -> Result<Self> {
        let mut head = Vec::with_capacity(3);
        input.by_ref().take(3).read_to_end(&mut head)?;
        let (encoding, mark) = match head.as_slice() {
            [0xff, 0xfe, ..] => (Encoding::Utf16(u16::from_le_bytes), 2),
            [0xfe, 0xff, ..] => (Encoding::Utf16(u16::from_be_bytes), 2),
            [0xef, 0xbb, 0xbf] => (Encoding::Utf8, 3),
            _ => (Encoding::Utf8, 0),
        };
        head.drain(..mark);
        Ok(Self { input: Cursor::new(head).chain(input), encoding, bytes: Vec::new() })
    }

    pub(super) fn next(&mut self) -> Result<Option<Line>> {
        let line = match self.encoding {
            Encoding::Utf8 => self.next_utf8()?,
            Encoding::Utf16(unit) => self.next_utf16(unit)?,
        };
        Ok(line.map(|mut line| {
            if line.text.contains('\0') {
                line.text.retain(|c| c != '\0');
            }
            line.text.truncate(line.text.trim_end_matches(['\n', '\r']).len());
            line
        }))
    }

    fn next_utf8(&mut self) -> Result<Option<Line>> {
        self.bytes.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.input.by_ref().take(limit).read_until(b'\n', &mut self.bytes)? == 0 {
            return Ok(None);
        }
        let cut = self.bytes.len() > MAX_LINE_BYTES && self.bytes.last() != Some(&b'\n');
        if cut {
            self.bytes.truncate(MAX_LINE_BYTES);
            self.input.skip_until(b'\n')?;
            // The cut may have split a character, which is not the writer's fault.
            if let Err(error) = std::str::from_utf8(&self.bytes)
                && error.error_len().is_none()
            {
                self.bytes.truncate(error.valid_up_to());
            }
        }
        let text = String::from_utf8_lossy(&self.bytes);
        let replaced = matches!(text, std::borrow::Cow::Owned(_));
        Ok(Some(Line { text: text.into_owned(), cut, replaced }))
    }

    fn next_utf16(&mut self, unit: fn([u8; 2]) -> u16) -> Result<Option<Line>> {
        let mut units = Vec::new();
        let (mut read, mut cut) = (false, false);
        loop {
            let mut pair = [0; 2];
            match self.input.read_exact(&mut pair) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            read = true;
            match unit(pair) {
                0x0a => break,
                _ if units.len() >= MAX_LINE_BYTES / 2 => cut = true,
                unit => units.push(unit),
            }
        }
        let mut replaced = false;
        let characters = char::decode_utf16(units).map(|c| {
            c.unwrap_or_else(|_| {
                replaced = true;
                char::REPLACEMENT_CHARACTER
            })
        });
        let text = characters.collect();
        Ok(read.then_some(Line { text, cut, replaced }))
    }
}
