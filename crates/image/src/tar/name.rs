//! Normalises names for the tree, and parses the names of whiteouts.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::error::NameError;
use crate::tree::NAME_MAX;

/// Writes `raw` to `path` as components with single slashes between them; empty for the root.
pub(super) fn normalise(raw: &[u8], path: &mut Vec<u8>) -> Result<(), NameError> {
    path.clear();
    if raw.contains(&0) {
        return Err(NameError::Nul);
    }
    for component in raw.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => continue,
            b".." => return Err(NameError::Parent),
            _ if component.len() > NAME_MAX => return Err(NameError::TooLong(component.len())),
            _ => {}
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(component);
    }
    Ok(())
}

/// The effect of an entry on lower layers, by its file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whiteout<'a> {
    /// An ordinary file without an effect.
    None,
    /// Hides this name in the lower layers, in the entry's directory.
    Hide(&'a [u8]),
    /// Hides all names in the lower layers in the entry's directory.
    Opaque,
    /// A name that AUFS reserves for metadata, or a whiteout of an invalid name: neither a file nor an effect.
    Ignored,
}

/// Parses a file name by the rule "Whiteouts" of the OCI image specification.
#[must_use]
pub fn whiteout(name: &[u8]) -> Whiteout<'_> {
    match name.strip_prefix(b".wh.") {
        None => Whiteout::None,
        Some(b".wh..opq") => Whiteout::Opaque,
        // `.` and `..` would hide the directory itself or its parent.
        Some(b"" | b"." | b"..") => Whiteout::Ignored,
        Some(hidden) if hidden.starts_with(b".wh.") => Whiteout::Ignored,
        Some(hidden) => Whiteout::Hide(hidden),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_name(raw: &[u8], expected: Result<&[u8], NameError>) {
        let mut path = b"of the entry before".to_vec();
        let result = normalise(raw, &mut path).map(|()| &path[..]);
        assert_eq!(result, expected, "{}", raw.escape_ascii());
    }

    #[test]
    fn names() {
        check_name(b"a/b", Ok(b"a/b"));
        check_name(b"./a/b/", Ok(b"a/b"));
        check_name(b"/a//b", Ok(b"a/b"));
        check_name(b"//./a/./b/.", Ok(b"a/b"));
        check_name(b"./", Ok(b""));
        check_name(b"", Ok(b""));
        check_name(b"/", Ok(b""));
        check_name(b"...", Ok(b"..."));
        check_name(b".a/..b/c..", Ok(b".a/..b/c.."));
        check_name(b"\xff\n\\ ", Ok(b"\xff\n\\ "));
        check_name(b"..", Err(NameError::Parent));
        check_name(b"a/../b", Err(NameError::Parent));
        check_name(b"/../etc/passwd", Err(NameError::Parent));
        check_name(b"a\0b", Err(NameError::Nul));
        check_name(&[b'n'; 255], Ok(&[b'n'; 255]));
        check_name(&[b'n'; 256], Err(NameError::TooLong(256)));
    }

    fn check_whiteout(name: &[u8], expected: Whiteout<'_>) {
        assert_eq!(whiteout(name), expected, "{}", name.escape_ascii());
    }

    #[test]
    fn whiteouts() {
        check_whiteout(b"file", Whiteout::None);
        check_whiteout(b".wh", Whiteout::None);
        check_whiteout(b"a.wh.b", Whiteout::None);
        check_whiteout(b".wh.a", Whiteout::Hide(b"a"));
        check_whiteout(b".wh..a", Whiteout::Hide(b".a"));
        check_whiteout(b".wh....", Whiteout::Hide(b"..."));
        check_whiteout(b".wh..wh", Whiteout::Hide(b".wh"));
        check_whiteout(b".wh..wh..opq", Whiteout::Opaque);
        check_whiteout(b".wh..wh.plnk", Whiteout::Ignored);
        check_whiteout(b".wh..wh..opqx", Whiteout::Ignored);
        check_whiteout(b".wh..wh.", Whiteout::Ignored);
        check_whiteout(b".wh.", Whiteout::Ignored);
        check_whiteout(b".wh..", Whiteout::Ignored);
        check_whiteout(b".wh...", Whiteout::Ignored);
    }
}
