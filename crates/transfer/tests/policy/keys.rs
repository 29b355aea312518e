//! Makes keys and signatures with `openssl`, in cosign's format.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns a command that runs `openssl`; each test has checked that it is installed.
fn openssl() -> Command {
    testing::command("openssl").expect("the test asked for it")
}

pub(crate) fn run(command: &mut Command) -> Vec<u8> {
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {said}");
    out.stdout
}

/// A type of key and signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    P256,
    P384,
    P384Sha256,
    Rsa,
    RsaPss,
    Ed25519,
}

pub(crate) const KINDS: [Kind; 6] =
    [Kind::P256, Kind::P384, Kind::P384Sha256, Kind::Rsa, Kind::RsaPss, Kind::Ed25519];

/// A key pair in files.
#[derive(Debug)]
pub(crate) struct Key {
    kind: Kind,
    private: PathBuf,
    pub(crate) public: PathBuf,
}

impl Key {
    pub(crate) fn make(folder: &Path, name: &str, kind: Kind) -> Self {
        let [private, public] = ["key", "pub"].map(|it| folder.join(format!("{name}.{it}")));
        let options: &[&str] = match kind {
            Kind::P256 => &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
            Kind::P384 | Kind::P384Sha256 => &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"],
            Kind::Rsa | Kind::RsaPss => &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
            Kind::Ed25519 => &["ED25519"],
        };
        let mut command = openssl();
        run(command.arg("genpkey").arg("-out").arg(&private).arg("-algorithm").args(options));
        let mut command = openssl();
        run(command.args(["pkey", "-pubout", "-in"]).arg(&private).arg("-out").arg(&public));
        Self { kind, private, public }
    }

    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), message).unwrap();
        let mut command = openssl();
        match self.kind {
            Kind::Ed25519 => {
                command
                    .args(["pkeyutl", "-sign", "-rawin", "-inkey"])
                    .arg(&self.private)
                    .arg("-in");
            }
            kind => {
                let hash = if kind == Kind::P384 { "-sha384" } else { "-sha256" };
                command.args(["dgst", hash, "-sign"]).arg(&self.private);
                if kind == Kind::RsaPss {
                    let padding = ["rsa_padding_mode:pss", "rsa_pss_saltlen:digest"];
                    for option in padding {
                        command.args(["-sigopt", option]);
                    }
                }
            }
        }
        run(command.arg(file.path()))
    }
}
