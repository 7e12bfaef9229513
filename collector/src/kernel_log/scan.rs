//! The few moves that every parser here is made of. Each gives what it found and the text after it, or nothing; none
//! can panic, whatever the text.

use std::ops::RangeInclusive;

/// A decimal number of an allowed count of digits, at the very start.
pub(super) fn number(text: &str, digits: RangeInclusive<usize>) -> Option<(i64, &str)> {
    let count = text.bytes().take_while(u8::is_ascii_digit).count();
    if !digits.contains(&count) {
        return None;
    }
    let (value, rest) = text.split_at_checked(count)?;
    Some((value.parse().ok()?, rest))
}

/// The digits after a decimal point or comma as microseconds; 0 where there is no such point.
pub(super) fn fraction_micros(text: &str) -> (i64, &str) {
    let Some(digits) = text.strip_prefix(['.', ',']) else { return (0, text) };
    let count = digits.bytes().take_while(u8::is_ascii_digit).count();
    if count == 0 {
        return (0, text);
    }
    let micros = digits.bytes().chain(std::iter::repeat(b'0')).take(6).enumerate().fold(0, |sum, (at, byte)| {
        let digit = if at < count { i64::from(byte - b'0') } else { 0 };
        sum * 10 + digit
    });
    (micros, digits.get(count..).unwrap_or_default())
}

/// The first word and what follows the spaces after it.
pub(super) fn word(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// A hexadecimal number, with no sign and no `0x`.
pub(super) fn hex(text: &str, digits: RangeInclusive<usize>) -> Option<u32> {
    let plain = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u32::from_str_radix(text, 16).ok() } else { None }
}
