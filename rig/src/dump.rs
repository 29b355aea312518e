//! Reads fields of composefs dumps.

/// Returns the bytes of an escaped field, which is empty for the root's path.
#[must_use]
pub fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'\\', [b'x', high, low, tail @ ..]) => {
                let digit =
                    |it: u8| char::from(it).to_digit(16).and_then(|it| u8::try_from(it).ok());
                bytes.push(digit(*high).unwrap_or(0) << 4 | digit(*low).unwrap_or(0));
                tail
            }
            (b'\\', [letter, tail @ ..]) => {
                bytes.push(match letter {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                });
                tail
            }
            (byte, tail) => {
                bytes.push(*byte);
                tail
            }
        };
    }
    if bytes == b"/" { Vec::new() } else { bytes }
}
