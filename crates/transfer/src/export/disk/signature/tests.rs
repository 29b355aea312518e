//! Tests keys and certificates that cannot sign. Tests of the binary compare signatures with those of openssl.

use super::*;

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(der))
}

#[test]
fn keys_that_cannot_sign_have_a_reason() {
    let empty = element(SEQUENCE, &[]);
    for (text, expect) in [
        (String::new(), "it has no private key in PEM"),
        ("no PEM".to_owned(), "it has no private key in PEM"),
        (pem("CERTIFICATE", &empty), "it has no private key in PEM"),
        (pem("ENCRYPTED PRIVATE KEY", &empty), "one with a passphrase"),
        (pem("EC PRIVATE KEY", &empty), "no RSA key of 2048 to 4096 bits"),
        (pem("PRIVATE KEY", &empty), "no RSA key of 2048 to 4096 bits"),
        (pem("RSA PRIVATE KEY", &empty), "no RSA key of 2048 to 4096 bits"),
        (pem("RSA PRIVATE KEY", &[]), "no RSA key of 2048 to 4096 bits"),
        ("-----BEGIN PRIVATE KEY-----\nMAA=".to_owned(), "it has no private key in PEM"),
        ("-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----".to_owned(), "no private key"),
    ] {
        let error = SigningKey::from_pem(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expect), "{text}: {error}");
    }
}

/// A certificate without a meaning, whose key is `key`.
fn certificate(with_version: bool) -> Vec<u8> {
    let empty = element(SEQUENCE, &[]);
    let version = element(CONTEXT_0, &[&element(INTEGER, &[&[2]])]);
    let version = if with_version { version } else { Vec::new() };
    let serial = element(INTEGER, &[b"serial"]);
    let issuer = element(SEQUENCE, &[b"issuer"]);
    let info = element(SEQUENCE, &[&empty, &element(BIT_STRING, &[&[0], b"key"])]);
    let signed = element(SEQUENCE, &[&version, &serial, &empty, &issuer, &empty, &empty, &info]);
    element(SEQUENCE, &[&signed, &empty, &element(BIT_STRING, &[&[0]])])
}

#[test]
fn a_certificate_has_names_and_a_key() {
    for with_version in [true, false] {
        let certificate = certificate(with_version);
        let names = CertificateNames::read(&certificate).unwrap();
        assert_eq!(names.serial, element(INTEGER, &[b"serial"]));
        assert_eq!(names.issuer, element(SEQUENCE, &[b"issuer"]));
        assert_eq!(names.key, b"key");
    }
}

/// No prefix is a certificate, and no changed byte is a panic.
#[test]
fn malformed_certificates_are_none() {
    let certificate = certificate(true);
    for end in 0..certificate.len() {
        assert_eq!(CertificateNames::read(&certificate[..end]), None, "{end}");
    }
    for at in 0..certificate.len() {
        for value in [0, 0x7f, 0x80, 0x84, 0xff] {
            let mut changed = certificate.clone();
            changed[at] = value;
            let _may_be_read = CertificateNames::read(&changed);
        }
    }
    let longer = [&certificate[..], &[0]].concat();
    assert_eq!(CertificateNames::read(&longer), None);
}
