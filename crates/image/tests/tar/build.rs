//! Makes tars by hand, so that each field can be wrong.

/// A header of POSIX ustar, or of another format after changes. [`Header::block`] adds the checksum.
#[derive(Clone)]
pub(crate) struct Header([u8; 512]);

impl Header {
    pub(crate) fn new(name: &[u8], typeflag: u8) -> Self {
        let mut block = [0; 512];
        block[..name.len()].copy_from_slice(name);
        let mut header = Self(block);
        header.put(100, b"0000644\0");
        header.put(108, b"0000000\0");
        header.put(116, b"0000000\0");
        header.put(124, b"00000000000\0");
        header.put(136, b"00000000000\0");
        header.0[156] = typeflag;
        header.put(257, b"ustar\x0000");
        header
    }

    /// Overwrites the bytes at `at`.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Overwrites bytes like [`Header::put`], and returns the header.
    pub(crate) fn with(mut self, at: usize, bytes: &[u8]) -> Self {
        self.put(at, bytes);
        self
    }

    pub(crate) fn size(self, size: usize) -> Self {
        self.with(124, format!("{size:011o}\0").as_bytes())
    }

    pub(crate) fn link(self, target: &[u8]) -> Self {
        self.with(157, target)
    }

    /// Removes the magic, which makes a header of V7.
    pub(crate) fn v7(self) -> Self {
        self.with(257, &[0; 8])
    }

    pub(crate) fn gnu(self) -> Self {
        self.with(257, b"ustar  \0")
    }

    pub(crate) fn block(mut self) -> Vec<u8> {
        self.put(148, b"        ");
        let sum: u32 = self.0.iter().map(|&byte| u32::from(byte)).sum();
        self.put(148, format!("{sum:06o}\0 ").as_bytes());
        self.0.to_vec()
    }

    /// Like [`Header::block`], with a checksum of signed bytes.
    pub(crate) fn signed_block(mut self) -> Vec<u8> {
        self.put(148, b"        ");
        let sum: i32 = self.0.iter().map(|&byte| i32::from(byte.cast_signed())).sum();
        self.put(148, format!("{sum:06o}\0 ").as_bytes());
        self.0.to_vec()
    }
}

/// Returns `data` with zeros up to the next block.
pub(crate) fn padded(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.resize(data.len().next_multiple_of(512), 0);
    bytes
}

/// Returns a header, and data of the length that the header states.
pub(crate) fn member(name: &[u8], typeflag: u8, data: &[u8]) -> Vec<u8> {
    [Header::new(name, typeflag).size(data.len()).block(), padded(data)].concat()
}

pub(crate) fn file(name: &str, data: &str) -> Vec<u8> {
    member(name.as_bytes(), b'0', data.as_bytes())
}

/// Returns an extended header of type `x` or `g`.
pub(crate) fn extended(typeflag: u8, records: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut text = Vec::new();
    for (key, value) in records {
        text.extend_from_slice(&record(key, value));
    }
    member(b"PaxHeaders/x", typeflag, &text)
}

/// Returns `LENGTH KEY=VALUE\n`.
fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let body = [b" ", key, b"=", value, b"\n"].concat();
    let mut length = body.len() + 1;
    while length.to_string().len() + body.len() != length {
        length += 1;
    }
    [length.to_string().as_bytes(), &body].concat()
}

pub(crate) fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let records: Vec<_> =
        records.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
    extended(b'x', &records)
}

/// Returns the two blocks of zeros at the end.
pub(crate) fn end() -> Vec<u8> {
    vec![0; 1024]
}
