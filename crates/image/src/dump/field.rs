//! Parses the text of one field: escapes and numbers.

#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::{Field, Reason, Strictness};

/// Returns `raw` without escapes. The result is in `scratch` if `raw` has escapes.
pub(super) fn unescape<'a>(
    raw: &'a [u8],
    field: Field,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], Reason> {
    if memchr::memchr(b'\\', raw).is_none() {
        return Ok(raw);
    }
    scratch.clear();
    append_unescaped(raw, field, scratch)?;
    Ok(scratch)
}

/// Appends `raw` without escapes to `out`.
pub(super) fn append_unescaped(
    mut raw: &[u8],
    field: Field,
    out: &mut Vec<u8>,
) -> Result<(), Reason> {
    while let Some((plain, escape)) =
        memchr::memchr(b'\\', raw).and_then(|at| raw.split_at_checked(at))
    {
        out.extend_from_slice(plain);
        let (byte, rest) = match escape {
            [_, b'\\', rest @ ..] => (b'\\', rest),
            [_, b'n', rest @ ..] => (b'\n', rest),
            [_, b'r', rest @ ..] => (b'\r', rest),
            [_, b't', rest @ ..] => (b'\t', rest),
            [_, b'x', high, low, rest @ ..] => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => (high << 4 | low, rest),
                _ => return Err(unknown(field, escape, 4)),
            },
            [_, b'x', ..] => return Err(unknown(field, escape, 4)),
            _ => return Err(unknown(field, escape, 2)),
        };
        out.push(byte);
        raw = rest;
    }
    out.extend_from_slice(raw);
    Ok(())
}

fn unknown(field: Field, escape: &[u8], length: usize) -> Reason {
    Reason::Escape { field, escape: escape.iter().take(length).copied().collect() }
}

/// Returns the value of a hexadecimal digit of either case.
pub(super) const fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte.wrapping_sub(b'0')),
        b'a'..=b'f' => Some(byte.wrapping_sub(b'a').wrapping_add(10)),
        b'A'..=b'F' => Some(byte.wrapping_sub(b'A').wrapping_add(10)),
        _ => None,
    }
}

/// Returns a name up to its first NUL. If the strictness is [`Strictness::Exact`], a NUL is an error.
pub(super) fn name(bytes: &[u8], field: Field, strictness: Strictness) -> Result<&[u8], Reason> {
    let name = before_nul(bytes);
    match strictness {
        Strictness::Exact if name.len() < bytes.len() => Err(Reason::EscapedNul(field)),
        Strictness::Lenient | Strictness::Strict | Strictness::Exact => Ok(name),
    }
}

/// Returns the bytes before the first NUL, like a C string.
fn before_nul(bytes: &[u8]) -> &[u8] {
    memchr::memchr(0, bytes).and_then(|at| bytes.get(..at)).unwrap_or(bytes)
}

/// Parses a number like C's `strtoull`: leading blanks, then a sign. A number that is too large becomes the largest
/// number, and a minus wraps around.
pub(super) fn number(text: &[u8], field: Field) -> Result<u64, Reason> {
    // Most numbers in most dumps are 0 or 1.
    if let [digit @ b'0'..=b'7'] = text {
        return Ok(u64::from(digit.wrapping_sub(b'0')));
    }
    let radix = if field == Field::Mode { 8 } else { 10 };
    let wrong = || Reason::Number { field, text: text.to_vec() };
    let blanks = text.iter().take_while(|byte| is_blank(**byte)).count();
    let (negative, digits) = match text.get(blanks..).unwrap_or_default() {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    if digits.is_empty() {
        return Err(wrong());
    }
    let mut value = Some(0_u64);
    for byte in digits {
        let digit = match byte {
            b'0'..=b'9' => u64::from(byte.wrapping_sub(b'0')),
            _ => return Err(wrong()),
        };
        if digit >= radix {
            return Err(wrong());
        }
        value = value.and_then(|value| value.checked_mul(radix)?.checked_add(digit));
    }
    Ok(match value {
        None => u64::MAX,
        Some(value) if negative => value.wrapping_neg(),
        Some(value) => value,
    })
}

/// Like C's `isspace`, except for the space, which ends a field.
const fn is_blank(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r')
}

/// The range of numbers that a field can hold, for [`Strictness::Exact`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    least: i64,
    most: u64,
}

impl Bounds {
    pub(super) const NANOSECONDS: Self = Self { least: 0, most: 999_999_999 };
    pub(super) const SECONDS: Self = Self { least: i64::MIN, most: i64::MAX.unsigned_abs() };
    pub(super) const SIZE: Self = Self { least: 0, most: u64::MAX };
    pub(super) const MODE: Self = Self { least: 0, most: 0o177_777 };
    /// The range of all fields that have no narrower range.
    pub(super) const WORD: Self = Self { least: 0, most: 0xffff_ffff };

    /// Refuses `text` if [`number`] parses it as a different number, or if it is out of range.
    pub(super) fn check(self, text: &[u8], field: Field) -> Result<(), Reason> {
        let Self { least, most } = self;
        let radix = if field == Field::Mode { 8 } else { 10 };
        // `from_str_radix` accepts signs but not blanks.
        let blanks = text.iter().take_while(|byte| is_blank(**byte)).count();
        let digits = str::from_utf8(text.get(blanks..).unwrap_or_default()).unwrap_or_default();
        match i128::from_str_radix(digits, radix) {
            Ok(value) if value >= i128::from(least) && value <= i128::from(most) => Ok(()),
            _ => Err(Reason::Range { field, text: text.to_vec(), least, most }),
        }
    }
}

/// Returns the low 32 bits, which `mkcomposefs` keeps of most numbers.
pub(super) fn low(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_number(text: &str, field: Field, expect: Option<u64>) {
        assert_eq!(number(text.as_bytes(), field).ok(), expect, "{text:?}");
    }

    #[test]
    fn numbers_are_what_strtoull_reads() {
        check_number("0", Field::Size, Some(0));
        check_number("18446744073709551615", Field::Size, Some(u64::MAX));
        check_number("18446744073709551616", Field::Size, Some(u64::MAX));
        check_number("-18446744073709551616", Field::Size, Some(u64::MAX));
        check_number("-5", Field::Size, Some(0u64.wrapping_sub(5)));
        check_number("-0", Field::Size, Some(0));
        check_number("\t\x0b\x0c\r+7", Field::Size, Some(7));
        check_number("0755", Field::Mode, Some(0o755));
        check_number("-77644", Field::Mode, Some(0u64.wrapping_sub(0o77644)));
        for wrong in ["", "-", "+", " ", "+-1", "0x1", "1 ", "1x", "8_", "x"] {
            check_number(wrong, Field::Size, None);
        }
        check_number("8", Field::Mode, None);
    }

    fn check_unescape(raw: &str, expect: Result<&[u8], &str>) {
        let mut scratch = vec![1];
        match (unescape(raw.as_bytes(), Field::Path, &mut scratch), expect) {
            (Ok(found), Ok(expect)) => assert_eq!(found, expect, "{raw}"),
            (Err(found), Err(expect)) => assert_eq!(found.to_string(), expect, "{raw}"),
            (found, _) => panic!("{raw}: {found:?}"),
        }
    }

    #[test]
    fn escapes() {
        check_unescape("", Ok(b""));
        check_unescape("plain", Ok(b"plain"));
        check_unescape(r"\\\n\r\t\x00\xfF-", Ok(b"\\\n\r\t\x00\xff-"));
        check_unescape(r"a\x2fb", Ok(b"a/b"));
        check_unescape(r"a\q", Err(r#"PATH has the unknown escape "\\q""#));
        check_unescape(r"a\x4", Err(r#"PATH has the unknown escape "\\x4""#));
        check_unescape(r"a\x4gz", Err(r#"PATH has the unknown escape "\\x4g""#));
        check_unescape(r"a\X41", Err(r#"PATH has the unknown escape "\\X""#));
        check_unescape(r"a\", Err(r#"PATH has the unknown escape "\\""#));
    }
}
