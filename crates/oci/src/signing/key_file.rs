//! Files with private keys.

use std::fmt;
use std::io::{self, Read};

use zeroize::Zeroizing;

use super::encrypted::EncryptedKey;
use super::pem::blocks;
use super::{SigningKey, SigningKeyError};

/// Maximum size of a file with a private key, in bytes. Keys of RSA have 4 KiB.
pub const KEY_FILE_MAX: u64 = 64 << 10;
/// Variable with a passphrase, as cosign reads it.
pub const PASSPHRASE_VARIABLE: &str = "COSIGN_PASSWORD";
/// Size of the buffer that a file is read into, in bytes: one more than the maximum, so that a longer file is detected.
const SECRET_BUFFER: usize = (64 << 10) + 1;
const _: () = assert!(SECRET_BUFFER as u64 == KEY_FILE_MAX + 1);

/// Reads a file with a key or a passphrase. The memory is overwritten at the end.
///
/// # Errors
/// The error of `read`, or `FileTooLarge` for more than [`KEY_FILE_MAX`] bytes.
pub fn read_secret(file: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    // The buffer never grows, so that no copy stays behind in freed memory.
    let mut bytes = Zeroizing::new(vec![0; SECRET_BUFFER]);
    let mut file = file.take(KEY_FILE_MAX + 1);
    let mut length = 0;
    loop {
        match file.read(&mut bytes[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    if length as u64 > KEY_FILE_MAX {
        let refused = format!("it has more than {KEY_FILE_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, refused));
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// A passphrase of a private key. It never appears in messages or logs, and its memory is overwritten at the end.
pub struct Passphrase(Zeroizing<Vec<u8>>);

impl Passphrase {
    /// Wraps a passphrase, which may be empty.
    #[must_use]
    pub fn new(text: Vec<u8>) -> Self {
        Self(Zeroizing::new(text))
    }

    /// Returns the first line of a file as the passphrase, as podman and skopeo do.
    #[must_use]
    pub fn first_line(mut file: Zeroizing<Vec<u8>>) -> Self {
        let end = file.iter().position(|byte| *byte == b'\n').unwrap_or(file.len());
        file.truncate(end);
        Self(file)
    }

    pub(super) fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl From<Zeroizing<Vec<u8>>> for Passphrase {
    fn from(text: Zeroizing<Vec<u8>>) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A file with one private key, which may be encrypted.
#[derive(Debug)]
pub struct KeyFile(Content);

enum Content {
    /// A PKCS #8 document.
    Plain(Zeroizing<Vec<u8>>),
    /// The same, encrypted by cosign or skopeo.
    Encrypted(EncryptedKey),
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain(***)",
            Self::Encrypted(_) => "Encrypted(***)",
        })
    }
}

/// Labels of cosign's encrypted keys; the second one until version 2. Source: `pkg/cosign/keys.go`.
const ENCRYPTED: [&str; 2] = ["ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY"];
/// Label of PKCS #8. Source: RFC 7468, section 10.
const PLAIN: &str = "PRIVATE KEY";
/// Labels of other private keys, for the error.
const OTHER: [&str; 4] =
    ["EC PRIVATE KEY", "RSA PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "OPENSSH PRIVATE KEY"];

impl KeyFile {
    /// Parses a PEM file, as written by `cosign generate-key-pair`, `skopeo generate-sigstore-key` and `openssl
    /// genpkey`.
    ///
    /// # Errors
    /// [`SigningKeyError`] if the file does not contain exactly one private key in a known format.
    pub fn parse(pem: &[u8]) -> Result<Self, SigningKeyError> {
        // Other blocks are parameters of the curve, the public key or certificates.
        let mut keys = blocks(pem, |label| label.ends_with(PLAIN))?;
        let key = keys.pop().ok_or(SigningKeyError::Malformed(
            "it lacks \"-----BEGIN PRIVATE KEY-----\" and \"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\"",
        ))?;
        if !keys.is_empty() {
            return Err(SigningKeyError::Malformed("it has several: use one file for each key"));
        }
        if key.label == PLAIN {
            return Ok(Self(Content::Plain(key.decode()?)));
        }
        if ENCRYPTED.contains(&key.label) {
            return Ok(Self(Content::Encrypted(EncryptedKey::parse(&key.decode()?)?)));
        }
        match OTHER.into_iter().find(|it| *it == key.label) {
            Some(label) => Err(SigningKeyError::Encoding(label)),
            None => Err(SigningKeyError::Malformed("its PEM block has an unknown type")),
        }
    }

    /// Whether the key needs a passphrase.
    #[must_use]
    pub const fn is_encrypted(&self) -> bool {
        matches!(self.0, Content::Encrypted(_))
    }

    /// Returns the key. The passphrase is not used if the key is not encrypted. Decrypting takes up to 128 MiB of
    /// memory and half a second, which its maker chose against guesses.
    ///
    /// # Errors
    /// [`SigningKeyError`] if the passphrase is wrong or the key has an unknown kind.
    pub fn unlock(&self, passphrase: &Passphrase) -> Result<SigningKey, SigningKeyError> {
        match &self.0 {
            Content::Plain(der) => SigningKey::from_pkcs8(der),
            Content::Encrypted(key) => SigningKey::from_pkcs8(&key.decrypt(passphrase.expose())?),
        }
    }
}
