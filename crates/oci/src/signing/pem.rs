//! Finds the key in a PEM file. Source: RFC 7468.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::SigningKeyError;

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";

/// A block of a PEM file.
pub(super) struct PemBlock<'a> {
    pub(super) label: &'a str,
    base64: Zeroizing<String>,
}

impl PemBlock<'_> {
    /// Returns the bytes of the block.
    pub(super) fn decode(&self) -> Result<Zeroizing<Vec<u8>>, SigningKeyError> {
        let mut bytes = Zeroizing::new(vec![0; self.base64.len()]);
        let decoded = STANDARD.decode_slice(self.base64.as_bytes(), &mut bytes);
        let length =
            decoded.map_err(|_error| SigningKeyError::Malformed("its PEM block is not base64"))?;
        bytes.truncate(length);
        Ok(bytes)
    }
}

/// Returns the blocks with these labels. Text between the blocks is ignored.
pub(super) fn blocks(
    text: &[u8],
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<PemBlock<'_>>, SigningKeyError> {
    let malformed = SigningKeyError::Malformed;
    let text = std::str::from_utf8(text).map_err(|_error| malformed("it is not a PEM file"))?;
    let mut blocks = Vec::new();
    let mut lines = text.lines().map(str::trim_end);
    while let Some(line) = lines.next() {
        let label = line.strip_prefix(BEGIN).and_then(|it| it.strip_suffix(DASHES));
        let Some(label) = label.filter(|it| is_wanted(it)) else { continue };
        // The capacity is enough, so that no copy of the key stays behind in freed memory.
        let mut base64 = Zeroizing::new(String::with_capacity(text.len()));
        let is_whole = loop {
            match lines.next() {
                None => break false,
                Some(line) if line.starts_with(END) => {
                    break line[END.len()..].strip_suffix(DASHES) == Some(label);
                }
                Some(line) => base64.push_str(line.trim_start()),
            }
        };
        if !is_whole {
            return Err(malformed("its PEM block has no end"));
        }
        blocks.push(PemBlock { label, base64 });
    }
    Ok(blocks)
}
