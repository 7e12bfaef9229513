//! Configuration files: TOML with unknown keys refused, and errors that name the file, the line and the key.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::exit::Failure;

/// Reads a file into `T`, which must deny unknown fields.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::config(format!("cannot read the configuration {}: {error}", path.display())))?;
    parse(&text, &path.display().to_string())
}

/// Reads `text`; `name` stands for it in errors.
pub fn parse<T: DeserializeOwned>(text: &str, name: &str) -> Result<T, Failure> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        Failure::config(format!("{name} line {line}: {}", error.message().replace('\n', " ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Example {
        #[expect(dead_code, reason = "only its presence matters")]
        open_share: f64,
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_keys_that_exist() {
        let failure = parse::<Example>("open_share = 0.05\nopen_shere = 1\n", "detectors.toml").expect_err("refused");
        assert!(failure.message.starts_with("detectors.toml line 2: "), "{failure}");
        assert!(failure.message.contains("open_shere") && failure.message.contains("open_share"), "{failure}");
        assert_eq!(failure.fault.code(), 3);
    }
}
