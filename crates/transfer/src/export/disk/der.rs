//! Reads and writes the few DER elements of certificates and signatures. Source: ITU-T X.690, 8.1 and 10.1.

pub(super) const INTEGER: u8 = 0x02;
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
pub(super) const NULL: u8 = 0x05;
pub(super) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;
/// The tag `[0]` of an element with elements in it.
pub(super) const CONTEXT_0: u8 = 0xa0;

/// An element of another's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DerElement<'a> {
    pub(super) tag: u8,
    pub(super) content: &'a [u8],
    /// The content with its tag and length.
    pub(super) whole: &'a [u8],
}

/// Reads elements in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct DerReader<'a>(pub(super) &'a [u8]);

impl<'a> DerReader<'a> {
    /// Returns the next element if it has this tag. Otherwise, or if it does not fit, returns `None`.
    pub(super) fn read(&mut self, tag: u8) -> Option<DerElement<'a>> {
        let element = first(self.0).filter(|it| it.tag == tag)?;
        self.0 = self.0.get(element.whole.len()..)?;
        Some(element)
    }
}

fn first(bytes: &[u8]) -> Option<DerElement<'_>> {
    let [tag, short, ..] = *bytes else { return None };
    // Lengths of more than four bytes would be longer than any file here.
    let (length, header) = match short {
        0..=0x7f => (usize::from(short), 2),
        0x81..=0x84 => {
            let end = 2 + usize::from(short & 0x7f);
            let long = bytes.get(2..end)?;
            let length = long.iter().fold(0u64, |length, byte| length << 8 | u64::from(*byte));
            (usize::try_from(length).ok()?, end)
        }
        _ => return None,
    };
    let end = header.checked_add(length)?;
    Some(DerElement { tag, content: bytes.get(header..end)?, whole: bytes.get(..end)? })
}

/// Returns an element with these parts as its content.
pub(super) fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let mut bytes = vec![tag];
    let length = content.len().to_be_bytes();
    let used = length.iter().position(|it| *it != 0).unwrap_or(length.len() - 1);
    let length = &length[used..];
    if let [short @ 0..=0x7f] = length {
        bytes.push(*short);
    } else {
        // At most eight bytes.
        bytes.extend((0x80u8..).nth(length.len()));
        bytes.extend_from_slice(length);
    }
    bytes.extend(content);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_as_short_as_possible() {
        for (length, expect) in [
            (0, &[0x04, 0][..]),
            (127, &[0x04, 127]),
            (128, &[0x04, 0x81, 128]),
            (255, &[0x04, 0x81, 255]),
            (256, &[0x04, 0x82, 1, 0]),
            (65536, &[0x04, 0x83, 1, 0, 0]),
        ] {
            let content = vec![7; length];
            let bytes = element(OCTET_STRING, &[&content[..length / 2], &content[length / 2..]]);
            assert!(bytes.starts_with(expect), "{length}");
            let mut reader = DerReader(&bytes);
            let found = reader.read(OCTET_STRING).unwrap();
            assert_eq!((found.content, found.whole), (&*content, &*bytes), "{length}");
            assert!(reader.0.is_empty());
        }
    }

    #[test]
    fn malformed_elements_are_none() {
        for bytes in [
            &[][..],
            &[0x30],
            &[0x30, 1],
            &[0x30, 0x80],
            &[0x30, 0x81],
            &[0x30, 0x81, 1],
            &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff, 0],
            &[0x30, 0x85, 0, 0, 0, 0, 0],
            &[0x30, 0xff, 0, 0, 0, 0, 0, 0, 0],
            // Another tag.
            &[0x31, 0],
        ] {
            assert_eq!(DerReader(bytes).read(SEQUENCE), None, "{bytes:?}");
        }
    }
}
