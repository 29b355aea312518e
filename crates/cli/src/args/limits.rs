//! Parses the limits of `gc`.

use crate::args::writable::bytes;

/// Parses a duration and returns seconds: numbers, each followed by `s`, `m`, `h`, `d` or `w`, as for `until` of
/// podman and Docker.
pub(crate) fn seconds(text: &str) -> Result<i64, String> {
    let wrong = || {
        format!(
            "\"{text}\" is not a duration: use a number with s, m, h, d or w after it, for \
            example 24h or 7d"
        )
    };
    let mut rest = text;
    let mut all = 0_i64;
    while !rest.is_empty() {
        let digits = rest.trim_start_matches(|it: char| it.is_ascii_digit());
        let number = rest.strip_suffix(digits).unwrap_or_default();
        let number: i64 = number.parse().map_err(|_error| wrong())?;
        let mut units = digits.chars();
        let unit = match units.next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 24 * 3600,
            Some('w') => 7 * 24 * 3600,
            _ => return Err(wrong()),
        };
        let part = number.checked_mul(unit).ok_or_else(wrong)?;
        all = all.checked_add(part).ok_or_else(wrong)?;
        rest = units.as_str();
    }
    if text.is_empty() { Err(wrong()) } else { Ok(all) }
}

/// Parses a number of bytes, which may be 0.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => bytes(text).map(std::num::NonZeroU64::get),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases = [
            ("90s", Some(90)),
            ("15m", Some(900)),
            ("24h", Some(86_400)),
            ("1h30m", Some(5400)),
            ("7d", Some(604_800)),
            ("2w", Some(1_209_600)),
            ("0s", Some(0)),
            ("", None),
            ("24", None),
            ("h", None),
            ("1y", None),
            ("-1h", None),
            ("1 h", None),
            ("1.5h", None),
            ("9223372036854775807w", None),
            ("99999999999999999999s", None),
        ];
        for (text, expect) in cases {
            assert_eq!(seconds(text).ok(), expect, "{text}");
        }
        assert!(seconds("24").unwrap_err().contains("24h or 7d"));
        assert_eq!(
            ["0", "1k", "20g"].map(|it| size(it).ok()),
            [Some(0), Some(1024), Some(20 << 30)]
        );
        assert!(size("much").unwrap_err().contains("is not a size"));
    }
}
