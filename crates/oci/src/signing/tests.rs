use super::{KEY_FILE_MAX, KeyFile, Passphrase, SigningKey, SigningKeyError, read_secret};
use crate::Digest;
use crate::policy::{Form, PublicKey, SignedItem};

/// Cosign's encryption: `testdata/signatures/README.md` describes how these were made.
const COSIGN: &[u8] = include_bytes!("../../../../testdata/signatures/cosign.key");
const COSIGN_OLD: &[u8] = include_bytes!("../../../../testdata/signatures/cosign-old.key");
const COSIGN_PUBLIC: &[u8] = include_bytes!("../../../../testdata/signatures/cosign.pub");

/// An Ed25519 key pair. Source: RFC 8410, sections 10.1 and 10.3.
const ED25519: &str = "-----BEGIN PRIVATE KEY-----\n\
                       MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
                       -----END PRIVATE KEY-----\n";
const ED25519_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\n\
                              MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                              -----END PUBLIC KEY-----\n";

fn unlock(pem: &[u8], passphrase: &str) -> Result<SigningKey, SigningKeyError> {
    KeyFile::parse(pem)?.unlock(&Passphrase::new(passphrase.as_bytes().to_vec()))
}

#[test]
fn keys_of_cosign_and_openssl_have_their_public_keys() {
    let public = |pem: &[u8]| PublicKey::from_pem(pem).unwrap();
    let cosign = unlock(COSIGN, "correct horse").unwrap();
    assert_eq!(cosign.public(), &public(COSIGN_PUBLIC));
    assert_eq!(unlock(COSIGN_OLD, "correct horse").unwrap().public(), &public(COSIGN_PUBLIC));
    let plain = unlock(ED25519.as_bytes(), "not used").unwrap();
    assert_eq!(plain.public(), &public(ED25519_PUBLIC.as_bytes()));
    // By `openssl pkey -pubin -outform DER | sha256sum`, of the public key in the RFC.
    let fingerprint = "sha256:a1e9156054e04fac899ae9f275132cdc07a5dbc4ea2c2ad3a1ffc6e0d253681f";
    assert_eq!(plain.fingerprint().to_string(), fingerprint);
}

#[test]
fn a_signature_is_for_one_item_by_one_key() {
    let (cosign, other) =
        (unlock(COSIGN, "correct horse").unwrap(), unlock(ED25519.as_bytes(), "").unwrap());
    let manifest = SignedItem::Manifest(Digest::sha256(b"manifest"));
    let image = SignedItem::Image("ab".repeat(32).parse().unwrap());
    for (item, form) in [(manifest, Form::SimpleSigning), (image, Form::Image)] {
        for reference in ["", "ghcr.io/ours/app", "ghcr.io/ours/app:1.2"] {
            let signature = cosign.sign(&item, reference).unwrap();
            assert!(signature.is_by(cosign.public()) && !signature.is_by(other.public()));
            assert_eq!(signature.form(), form);
            let claim = signature.claim().unwrap();
            assert_eq!(
                [manifest, image].map(|it| claim.is_for(&it)),
                [item == manifest, item == image]
            );
            let name = claim.repository.map(|it| it.to_string());
            assert_eq!(name, (!reference.is_empty()).then(|| "ghcr.io/ours/app".to_owned()));
        }
    }
}

/// The payload of a manifest is byte for byte that of cosign. Source: `testdata/signatures/payload.json`, which
/// sigstore's library wrote.
#[test]
fn payloads() {
    let digest = Digest::sha256(b"manifest");
    let payload = SignedItem::Manifest(digest).payload("registry.example/team/app");
    let made = include_str!("../../../../testdata/signatures/payload.json");
    // Without annotations, Go's encoder writes null.
    let made = made.trim_end().replace("{\"a\":\"b\"}", "null");
    assert_eq!(String::from_utf8(payload).unwrap(), made);
    let id = "ab".repeat(32);
    let payload = SignedItem::Image(id.parse().unwrap()).payload("");
    let expect = format!(
        "{{\"critical\":{{\"identity\":{{\"docker-reference\":\"\"}},\"image\":{{\"quire-image-id\":\"{id}\"}},\
         \"type\":\"quire image signature\"}},\"optional\":null}}"
    );
    assert_eq!(String::from_utf8(payload).unwrap(), expect);
}

#[test]
fn wrong_passphrases_and_files() {
    let check = |pem: &[u8], passphrase: &str, expect: &str| {
        let error = unlock(pem, passphrase).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
        assert!(passphrase.is_empty() || !error.contains(passphrase), "{error}");
    };
    check(COSIGN, "wrong horse", "its passphrase is wrong, or it is damaged");
    check(COSIGN, "", "its passphrase is wrong");
    check(COSIGN_PUBLIC, "", "it lacks \"-----BEGIN PRIVATE KEY-----\"");
    check(b"", "", "it lacks");
    check(b"\xff", "", "it is not a PEM file");
    check(ED25519.repeat(2).as_bytes(), "", "it has several");
    let cut = &ED25519.as_bytes()[..ED25519.len() - 20];
    check(cut, "", "its PEM block has no end");
    check(ED25519.replace("MC4C", "MC4*").as_bytes(), "", "its PEM block is not base64");
    // X25519, which cannot sign. Source: RFC 8410, section 3.
    check(ED25519.replace("K2Vw", "K2Vu").as_bytes(), "", "has another type than ECDSA P-256");
    let labelled = |label: &str| ED25519.replace("PRIVATE KEY", label);
    for label in ["EC PRIVATE KEY", "RSA PRIVATE KEY", "ENCRYPTED PRIVATE KEY"] {
        check(labelled(label).as_bytes(), "", &format!("it has the type \"{label}\": `openssl"));
    }
    check(labelled("MY PRIVATE KEY").as_bytes(), "", "its PEM block has an unknown type");
    let sealed = labelled("ENCRYPTED SIGSTORE PRIVATE KEY");
    check(sealed.as_bytes(), "", "its encryption is not described");
}

#[test]
fn files_of_secrets_are_small() {
    let read = |length: u64| read_secret(std::io::Read::take(std::io::repeat(7), length));
    assert_eq!(read(0).unwrap().len(), 0);
    assert_eq!(read(KEY_FILE_MAX).unwrap().len() as u64, KEY_FILE_MAX);
    assert_eq!(read(KEY_FILE_MAX + 1).unwrap_err().to_string(), "it has more than 65536 bytes");
    assert!(read(u64::MAX).is_err());
}

#[test]
fn secrets_are_not_in_debug_output() {
    let passphrase = Passphrase::first_line(read_secret(&b"correct horse\nmore"[..]).unwrap());
    assert_eq!(format!("{passphrase:?}"), "***");
    let file = KeyFile::parse(COSIGN).unwrap();
    assert!(file.is_encrypted());
    assert_eq!(format!("{file:?}"), "KeyFile(Encrypted(***))");
    let key = file.unlock(&passphrase).unwrap();
    assert_eq!(format!("{key:?}"), format!("SigningKey({})", key.fingerprint()));
    let plain = KeyFile::parse(ED25519.as_bytes()).unwrap();
    assert!(!plain.is_encrypted());
    assert_eq!(format!("{plain:?}"), "KeyFile(Plain(***))");
}
