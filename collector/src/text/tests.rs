use std::io::BufReader;

use super::*;

/// Reads through a buffer of `capacity` bytes, so that every boundary is met.
fn lines_with(bytes: &[u8], capacity: usize) -> Vec<Line> {
    let mut lines = Lines::new(BufReader::with_capacity(capacity, bytes)).unwrap();
    let mut all = Vec::new();
    while let Some(line) = lines.next().unwrap() {
        all.push(line);
    }
    all
}

fn texts(bytes: &[u8]) -> Vec<String> {
    let all = lines_with(bytes, 8192);
    for capacity in [1, 2, 3, 7] {
        assert_eq!(lines_with(bytes, capacity), all, "buffer of {capacity}");
    }
    all.into_iter().map(|line| line.text).collect()
}

fn utf16(text: &str, mark: bool, bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
    let mark = mark.then_some('\u{feff}');
    mark.into_iter().chain(text.chars()).collect::<String>().encode_utf16().flat_map(bytes).collect()
}

#[test]
fn lines_are_the_same_in_every_encoding_and_with_either_line_end() {
    let want = ["timestamp, index", "", "Größe 東京 😀"];
    for text in [want.join("\n") + "\n", want.join("\r\n") + "\r\n", want.join("\n")] {
        assert_eq!(texts(text.as_bytes()), want);
        assert_eq!(texts(format!("\u{feff}{text}").as_bytes()), want);
        assert_eq!(texts(&utf16(&text, true, u16::to_le_bytes)), want);
        assert_eq!(texts(&utf16(&text, true, u16::to_be_bytes)), want);
    }
    let long = "timestamp, index, temperature.gpu, power.draw [W], utilization.gpu [%]";
    assert_eq!(texts(&utf16(long, false, u16::to_le_bytes)), [long]);
}

#[test]
fn the_last_line_tells_whether_it_ended() {
    for (text, want) in [("a\nb", vec![true, false]), ("a\nb\n", vec![true, true]), ("", vec![])] {
        for bytes in [text.as_bytes().to_vec(), utf16(text, !text.is_empty(), u16::to_le_bytes)] {
            let ended: Vec<bool> = lines_with(&bytes, 16).iter().map(|line| line.ended).collect();
            assert_eq!(ended, want, "{text:?}");
        }
    }
}

#[test]
fn bytes_that_are_no_text_are_replaced_and_told_and_nul_is_dropped() {
    let lines = lines_with(b"a\xffb\n\0\0c\0\nplain\n", 16);
    assert_eq!(lines[0].text, "a\u{fffd}b");
    assert_eq!(lines.iter().map(|line| line.replaced).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(lines[1].text, "c");
    // A lone surrogate, and a last byte without its other half.
    let lines = lines_with(b"\xff\xfe\x00\xd8\x0a\x00x\x00y", 16);
    assert_eq!((lines[0].text.as_str(), lines[0].replaced), ("\u{fffd}", true));
    assert_eq!((lines[1].text.as_str(), lines[1].replaced), ("x", true));
}

#[test]
fn a_line_of_any_length_takes_bounded_memory_and_the_next_is_whole() {
    let text = format!("{}\nnext\n", "é".repeat(MAX_LINE_BYTES));
    for bytes in [text.as_bytes().to_vec(), utf16(&text, true, u16::to_le_bytes)] {
        let lines = lines_with(&bytes, 1000);
        assert_eq!((lines.len(), lines[1].text.as_str(), lines[1].number), (2, "next", 2));
        assert!(lines[0].cut && lines[0].ended && !lines[0].replaced && !lines[1].cut);
        assert!(lines[0].text.len() <= MAX_LINE_BYTES);
    }
    let exact = "x".repeat(MAX_LINE_BYTES);
    assert!(!lines_with(format!("{exact}\n").as_bytes(), 1000)[0].cut);
    let unended = lines_with("x".repeat(MAX_LINE_BYTES + 5).as_bytes(), 1000);
    assert!(unended[0].cut && !unended[0].ended);
}

#[test]
fn a_mark_in_the_middle_of_files_that_were_put_together_is_no_text() {
    assert_eq!(texts("\u{feff}a\n\u{feff}b\n".as_bytes()), ["a", "b"]);
}
