//! Control characters in the values of lists.
//!
//! A newline or tab in a label could look like another row or column. Templates also write such characters themselves,
//! so those of values are replaced before a template is executed, and escaped in its output.

use serde_json::Value as Json;

/// First replacement, in a plane for private use, of which no list needs the characters. Source: Unicode 16, chapter
/// 23.5.
const FIRST: u32 = 0xf_0000;

/// Returns whether a character may look like the end of a row or column.
fn is_replaced(it: char) -> bool {
    it.is_control() || matches!(it, '\u{2028}' | '\u{2029}')
}

/// Returns the character behind a replacement.
fn original(it: char) -> Option<char> {
    let it = char::from_u32(u32::from(it).checked_sub(FIRST)?)?;
    is_replaced(it).then_some(it)
}

fn disguise_text(text: &str) -> String {
    let replace = |it: char| match is_replaced(it) {
        true => char::from_u32(FIRST + u32::from(it)).unwrap_or(char::REPLACEMENT_CHARACTER),
        false => it,
    };
    text.chars().map(replace).collect()
}

/// Replaces control characters in all texts of a value.
pub(super) fn disguise(value: &Json) -> Json {
    match value {
        Json::String(it) => Json::String(disguise_text(it)),
        Json::Array(all) => all.iter().map(disguise).collect(),
        Json::Object(all) => {
            all.iter().map(|(name, it)| (disguise_text(name), disguise(it))).collect()
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => value.clone(),
    }
}

/// Returns a text with its control characters, for functions that escape them in another way.
pub(super) fn reveal(text: &str) -> String {
    text.chars().map(|it| original(it).unwrap_or(it)).collect()
}

/// Escapes the replaced characters in the output of a template.
pub(super) fn escape_disguised(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for it in text.chars() {
        match original(it) {
            Some(it) => out.extend(it.escape_debug()),
            None => out.push(it),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_of_values_are_escaped() {
        let check = |text: &str, expect: &str| {
            let hidden = disguise_text(text);
            assert!(!hidden.chars().any(is_replaced), "{text:?}");
            assert_eq!(reveal(&hidden), text);
            assert_eq!(escape_disguised(&hidden), expect);
        };
        check("plain \u{e4}\u{200b}", "plain \u{e4}\u{200b}");
        check("a\nb\tc\r", r"a\nb\tc\r");
        check("\0\u{1b}[2J\u{7f}\u{9b}\u{2028}", r"\0\u{1b}[2J\u{7f}\u{9b}\u{2028}");
        assert_eq!(escape_disguised("a\n\tb"), "a\n\tb", "the template's own");
    }
}
