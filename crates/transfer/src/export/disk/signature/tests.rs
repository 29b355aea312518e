//! Tests keys and certificates that cannot sign. Tests of the binary compare signatures with those of openssl.

use super::*;

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(der))
}

#[test]
fn keys_that_cannot_sign_have_a_reason() {
    let empty = construct_der(|it| it.write_sequence(|_| ()));
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
        let error = RootHashKey::from_pem(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expect), "{text}: {error}");
    }
}

/// A certificate without a meaning, whose key is `key`.
fn certificate(with_version: bool) -> Vec<u8> {
    let empty = |writer: DERWriter<'_>| writer.write_sequence(|_| ());
    construct_der(|writer| {
        writer.write_sequence(|certificate| {
            certificate.next().write_sequence(|signed| {
                if with_version {
                    signed.next().write_tagged(Tag::context(0), |it| it.write_u8(2));
                }
                signed.next().write_u32(SERIAL);
                empty(signed.next());
                signed.next().write_sequence(|issuer| issuer.next().write_utf8_string("issuer"));
                empty(signed.next());
                empty(signed.next());
                signed.next().write_sequence(|info| {
                    empty(info.next());
                    info.next().write_bitvec_bytes(b"key", 24);
                });
            });
            empty(certificate.next());
            certificate.next().write_bitvec_bytes(&[], 0);
        });
    })
}

const SERIAL: u32 = 77_777;

#[test]
fn a_certificate_has_names_and_a_key() {
    for with_version in [true, false] {
        let certificate = certificate(with_version);
        let names = CertificateNames::read(&certificate).unwrap();
        assert_eq!(names.serial, construct_der(|it| it.write_u32(SERIAL)));
        let issuer =
            construct_der(|it| it.write_sequence(|it| it.next().write_utf8_string("issuer")));
        assert_eq!(names.issuer, issuer);
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
