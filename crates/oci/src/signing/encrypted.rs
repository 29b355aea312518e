//! Private keys that are encrypted with a passphrase: scrypt makes a key for NaCl's secretbox.
//!
//! Sources: go-securesystemslib, `encrypted/encrypted.go`; RFC 7914 for scrypt; NaCl, `crypto_secretbox`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use poly1305::Poly1305;
use poly1305::universal_hash::KeyInit as _;
use salsa20::XSalsa20;
use salsa20::cipher::{KeyIvInit as _, StreamCipher as _};
use serde::Deserialize;
use zeroize::Zeroizing;

use super::SigningKeyError;

/// The accepted costs of scrypt: base-2 logarithms of N. Other programs make keys only with these, and with r = 8 and p
/// = 1, so a hostile file can make Quire use at most 128 MiB.
const LOG_N: [u8; 3] = [15, 16, 17];
const R: u32 = 8;
const P: u32 = 1;
/// Length of Poly1305's tag before the encrypted data, in bytes.
const TAG: usize = 16;

#[derive(Deserialize)]
struct RawKey {
    kdf: RawKdf,
    cipher: RawCipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct RawKdf {
    name: String,
    params: RawParams,
    salt: String,
}

#[derive(Deserialize)]
struct RawParams {
    #[serde(rename = "N")]
    n: u64,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct RawCipher {
    name: String,
    nonce: String,
}

/// An encrypted key with supported parameters.
pub(super) struct EncryptedKey {
    log_n: u8,
    salt: Vec<u8>,
    nonce: [u8; 24],
    sealed: Vec<u8>,
}

impl EncryptedKey {
    /// Parses the JSON in cosign's PEM block.
    pub(super) fn parse(json: &[u8]) -> Result<Self, SigningKeyError> {
        let malformed = SigningKeyError::Malformed;
        let raw: RawKey = serde_json::from_slice(json)
            .map_err(|_error| malformed("its encryption is not described"))?;
        if raw.kdf.name != "scrypt" || raw.cipher.name != "nacl/secretbox" {
            return Err(malformed("its encryption is not scrypt with nacl/secretbox"));
        }
        let RawParams { n, r, p } = raw.kdf.params;
        let log_n = LOG_N.into_iter().find(|it| 1_u64 << it == n).filter(|_| r == R && p == P);
        let log_n =
            log_n.ok_or(malformed("its encryption has another cost than scrypt's usual"))?;
        let plain = |text: &str| {
            STANDARD.decode(text).map_err(|_error| malformed("its encryption is not base64"))
        };
        let nonce = plain(&raw.cipher.nonce)?;
        let nonce = nonce.try_into();
        let nonce = nonce.map_err(|_error| malformed("its nonce does not have 24 bytes"))?;
        Ok(Self { log_n, salt: plain(&raw.kdf.salt)?, nonce, sealed: plain(&raw.ciphertext)? })
    }

    pub(super) fn decrypt(&self, passphrase: &[u8]) -> Result<Zeroizing<Vec<u8>>, SigningKeyError> {
        let costs = scrypt::Params::new(self.log_n, R, P).expect("the costs are usual ones");
        let mut key = Zeroizing::new([0; 32]);
        scrypt::scrypt(passphrase, &self.salt, &costs, &mut *key)
            .expect("scrypt can make 32 bytes");
        open_box(&key, &self.nonce, &self.sealed).ok_or(SigningKeyError::Passphrase)
    }
}

/// Opens a secretbox. `None` if the key is wrong or the box is damaged.
fn open_box(key: &[u8; 32], nonce: &[u8; 24], sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (tag, sealed) = sealed.split_first_chunk::<TAG>()?;
    let mut stream = XSalsa20::new(key.into(), nonce.into());
    // The first 32 bytes of the stream are the key of the authenticator, and the rest encrypts.
    let mut authenticator = Zeroizing::new([0; 32]);
    stream.apply_keystream(&mut *authenticator);
    let computed = Poly1305::new((&*authenticator).into()).compute_unpadded(sealed);
    // The comparison need not take constant time, because its time is known only to the owner of the passphrase.
    if computed[..] != tag[..] {
        return None;
    }
    let mut plain = Zeroizing::new(sealed.to_vec());
    stream.apply_keystream(&mut plain);
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::{EncryptedKey, open_box};

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|it| it.is_ascii_hexdigit()).collect();
        let pair = |it: &[u8]| u8::from_str_radix(std::str::from_utf8(it).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    /// Source: NaCl, `tests/secretbox.c` and its output.
    #[test]
    fn a_box_of_nacl() {
        let key = hex("1b27556473e985d4 62cd51197a9a46c7 6009549eac6474f2 06c4ee0844f68389");
        let nonce = hex("69696ee955b62b73 cd62bda875fc73d6 8219e0036b7a0b37");
        let sealed = hex("f3ffc7703f9400e52a7dfb4b3d3305d9 8e993b9f48681273c29650ba32fc76ce
             48332ea7164d96a4476fb8c531a1186a c0dfc17c98dce87b4da7f011ec48c972
             71d2c20f9b928fe2270d6fb863d51738 b48eeee314a7cc8ab932164548e526ae
             90224368517acfeabd6bb3732bc0e9da 99832b61ca01b6de56244a9e88d5f9b3
             7973f622a43d14a6599b1f654cb45a74 e355a5");
        let plain = hex("be075fc53c81f2d5cf141316ebeb0c7b 5228c52a4c62cbd44b66849b64244ffc
             e5ecbaaf33bd751a1ac728d45e6c6129 6cdc3c01233561f41db66cce314adb31
             0e3be8250c46f06dceea3a7fa1348057 e2f6556ad6b1318a024a838f21af1fde
             048977eb48f59ffd4924ca1c60902e52 f0a089bc76897040e082f93776384864
             5e0705");
        let (key, nonce) = (key.try_into().unwrap(), nonce.try_into().unwrap());
        assert_eq!(**open_box(&key, &nonce, &sealed).unwrap(), *plain);
        for at in [0, 15, 16, sealed.len() - 1] {
            let mut sealed = sealed.clone();
            sealed[at] ^= 1;
            assert!(open_box(&key, &nonce, &sealed).is_none(), "byte {at}");
        }
        for length in [0, 15, 16, sealed.len() - 1] {
            assert!(open_box(&key, &nonce, &sealed[..length]).is_none(), "{length} bytes");
        }
    }

    #[test]
    fn costs_that_no_program_chooses_are_refused() {
        let check = |n: &str, r: &str, p: &str| {
            let json = format!(
                r#"{{"kdf":{{"name":"scrypt","params":{{"N":{n},"r":{r},"p":{p}}},"salt":""}},
                "cipher":{{"name":"nacl/secretbox","nonce":"{}"}},"ciphertext":""}}"#,
                "A".repeat(32)
            );
            EncryptedKey::parse(json.as_bytes()).is_ok()
        };
        // Source: go-securesystemslib, `encrypted.go`.
        for n in ["32768", "65536", "131072"] {
            assert!(check(n, "8", "1"), "{n}");
        }
        let bad = [
            ("262144", "8", "1"),
            ("65535", "8", "1"),
            ("0", "8", "1"),
            ("18446744073709551615", "8", "1"),
            ("65536", "4294967295", "1"),
            ("65536", "8", "4294967295"),
            ("65536", "0", "1"),
            ("-1", "8", "1"),
        ];
        for (n, r, p) in bad {
            assert!(!check(n, r, p), "{n} {r} {p}");
        }
    }
}
