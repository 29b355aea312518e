//! `quire-image-verifier`: by this name, containerd asks the policies whether it may pull an image.
//!
//! containerd calls each program in a directory with the name and the digest that the name resolved to. It pulls the
//! image only if all of them exit with 0, and logs what they print. Source: containerd 2, `docs/image-verification.md`
//! and `pkg/imageverifier/bindir`.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use oci::Digest;
use oci::policy::{Repository, admit};
use oci::reference::Reference;
use oci::registry::{Pauses, Registry};
use serde::Deserialize;

use crate::args::RegistryOptions;
use crate::output::report;
use crate::session::context;
use crate::session::policy::policies_of_host;
use crate::verbs::images::registry::pull::settings;

/// Name under which containerd calls this program.
const NAME: &[u8] = b"quire-image-verifier";
/// Media type of a descriptor on standard input.
const DESCRIPTOR: &str = "application/vnd.oci.descriptor.v1+json";
/// Maximum size of the descriptor, in bytes.
const DESCRIPTOR_MAX: u64 = 64 << 10;
/// Time for all requests to the registry. containerd kills the program after 10 seconds, without a reason in its log.
/// Source: containerd, `per_verifier_timeout`.
const TIME: Duration = Duration::from_secs(9);

/// Whether this program was called by its other name.
pub(crate) fn is_called(arguments: impl IntoIterator<Item = OsString>) -> bool {
    let own = arguments.into_iter().next();
    own.is_some_and(|it| Path::new(&it).file_name().is_some_and(|it| it.as_bytes() == NAME))
}

/// Decides about the image of containerd's arguments.
pub(crate) fn main(arguments: Vec<OsString>) -> ExitCode {
    let (code, text) = match in_time(arguments) {
        Ok(text) => (ExitCode::SUCCESS, text),
        Err(error) => (ExitCode::FAILURE, format!("{error:#}")),
    };
    // If containerd reads no reason, the exit code still counts.
    let _written = report::line(&report::plain(&text));
    code
}

/// Decides in bounded time, whatever the registry and the other end of standard input do.
fn in_time(arguments: Vec<OsString>) -> anyhow::Result<String> {
    let cancel = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let for_thread = Arc::clone(&cancel);
    let decide = move || {
        // Without a receiver, the time is over.
        let _late = sender.send(decide(arguments, &for_thread));
    };
    std::thread::Builder::new().spawn(decide).context("cannot start a thread")?;
    let decided = receiver.recv_timeout(TIME);
    cancel.store(true, Ordering::Relaxed);
    match decided {
        Ok(decided) => decided,
        Err(mpsc::RecvTimeoutError::Timeout) => {
            bail!(
                "there was no decision within {} seconds: does the registry respond?",
                TIME.as_secs()
            )
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the check has failed"),
    }
}

fn decide(arguments: Vec<OsString>, cancel: &Arc<AtomicBool>) -> anyhow::Result<String> {
    let asked = VerifierArgs::parse(arguments)?;
    if asked.has_descriptor {
        asked.check_descriptor(std::io::stdin().lock())?;
    }
    let VerifierArgs { name, digest, .. } = asked;
    let named = std::env::var_os("QUIRE_POLICY").map(PathBuf::from);
    let policies = policies_of_host(named.as_deref())?;
    if policies.is_empty() {
        // An administrator has linked this program, and expects a policy.
        bail!(
            "there is no policy: write /etc/quire/policy.toml, or remove this program from the engine's directory"
        );
    }
    let options =
        RegistryOptions { authfile: None, certs_dir: None, plain_http: false, tls_verify: None };
    let who = context::who_at_start();
    let registry = Registry::new(&name, &settings(who, &options, cancel, Pauses::default())?)?;
    let repository = Repository::new(name.registry(), name.repository());
    // containerd decides about the digest that the name leads to, so a signature of one platform's manifest does not
    // count for an index: containerd may take another manifest of it.
    let (verdict, _) = admit(&policies, &registry, &repository, &digest, Vec::new())?;
    let keys: Vec<_> = verdict.signed_by.iter().map(|it| it.display().to_string()).collect();
    let by = if keys.is_empty() { "" } else { ", signed by " };
    Ok(format!("accepted: {repository}@{digest}{by}{}", keys.join(" and ")))
}

/// The arguments of containerd.
#[derive(Debug, PartialEq, Eq)]
struct VerifierArgs {
    name: Reference,
    digest: Digest,
    /// Whether a descriptor of the image is on standard input.
    has_descriptor: bool,
}

#[derive(Deserialize)]
struct RawDescriptor {
    digest: Digest,
}

impl VerifierArgs {
    /// Parses the arguments as Go's package `flag` does: one or two dashes, and the value after a space or an equals
    /// sign.
    fn parse(arguments: Vec<OsString>) -> anyhow::Result<Self> {
        let (mut name, mut digest, mut media_type) = (None, None, None);
        let mut rest = arguments.into_iter();
        while let Some(argument) = rest.next() {
            let text = argument.into_string().ok().context("an argument is not UTF-8")?;
            let flag = text.strip_prefix('-').map(|it| it.strip_prefix('-').unwrap_or(it));
            let (flag, value) = match flag.and_then(|it| it.split_once('=')) {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (flag.unwrap_or_default(), None),
            };
            let place = match flag {
                "name" => &mut name,
                "digest" => &mut digest,
                "stdin-media-type" => &mut media_type,
                _ => bail!("unknown argument \"{}\": {USAGE}", text.escape_debug()),
            };
            let value = match value {
                Some(value) => value,
                None => rest
                    .next()
                    .and_then(|it| it.into_string().ok())
                    .with_context(|| format!("-{flag} needs a value: {USAGE}"))?,
            };
            if place.replace(value).is_some() {
                bail!("-{flag} is given twice");
            }
        }
        let text: String = name.with_context(|| format!("-name is missing: {USAGE}"))?;
        let name: Reference = text.parse()?;
        // containerd takes the first part of any name for the registry, but Docker completes some names.
        if text.split('/').next() != Some(name.registry()) {
            bail!("the name \"{}\" does not begin with a registry", text.escape_debug());
        }
        let digest = digest.with_context(|| format!("-digest is missing: {USAGE}"))?;
        let digest: Digest = digest.parse()?;
        if let Some(other) = name.digest().filter(|it| **it != digest) {
            bail!("the name has the digest {other}, not {digest}");
        }
        let has_descriptor = match media_type.as_deref() {
            None => false,
            Some(DESCRIPTOR) => true,
            Some(other) => bail!("unknown -stdin-media-type \"{}\"", other.escape_debug()),
        };
        Ok(Self { name, digest, has_descriptor })
    }

    /// Checks that the descriptor is that of the digest.
    fn check_descriptor(&self, input: impl std::io::Read) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        let read = input.take(DESCRIPTOR_MAX + 1).read_to_end(&mut bytes);
        read.context("cannot read standard input")?;
        if bytes.len() as u64 > DESCRIPTOR_MAX {
            bail!("standard input has more than {DESCRIPTOR_MAX} bytes");
        }
        let found: RawDescriptor =
            serde_json::from_slice(&bytes).context("standard input is not a descriptor")?;
        if found.digest != self.digest {
            bail!("the descriptor has the digest {}, not {}", found.digest, self.digest);
        }
        Ok(())
    }
}

const USAGE: &str = "quire-image-verifier -name NAME -digest DIGEST [-stdin-media-type TYPE]";

/// Arguments and explanation for the man page.
pub(crate) const MANUAL: &str = "\
-name NAME -digest DIGEST [-stdin-media-type TYPE]

containerd calls each program in a directory before it pulls an image, and pulls only if all of them exit with 0. A \
link in that directory lets Quire decide by the policy of the host:

  ln -s /usr/bin/quire-image-verifier /opt/containerd/image-verifier/bin/

Quire fetches signatures from the registry if a rule needs them, with root's credentials. It decides within 9 seconds, \
prints the reason of a refusal, and refuses every image if there is no policy.

OPTIONS:
  -name NAME  The name of the image, which begins with a registry.
  -digest DIGEST  The digest that the name led to.
  -stdin-media-type TYPE  The type of the document on standard input: application/vnd.oci.descriptor.v1+json.
";

#[cfg(test)]
mod tests {
    use super::VerifierArgs;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parse(line: &str) -> Result<VerifierArgs, String> {
        let words = line.replace("DIGEST", DIGEST);
        let words = words.split(' ').filter(|it| !it.is_empty()).map(Into::into).collect();
        VerifierArgs::parse(words).map_err(|it| it.to_string())
    }

    #[test]
    fn arguments() {
        for line in [
            "-name docker.io/library/alpine:3 -digest DIGEST",
            "--name docker.io/library/alpine:3 --digest=DIGEST",
            "-digest=DIGEST -name=docker.io/library/alpine:3@DIGEST",
        ] {
            let asked = parse(line).unwrap();
            assert_eq!(asked.name.name(), "docker.io/library/alpine", "{line}");
            assert!(!asked.has_descriptor);
        }
        let typed = "-name ghcr.io/a -digest DIGEST -stdin-media-type application/vnd.oci.descriptor.v1+json";
        assert!(parse(typed).unwrap().has_descriptor);
        for (line, expect) in [
            ("", "-name is missing"),
            ("-name ghcr.io/a", "-digest is missing"),
            ("-name", "-name needs a value"),
            ("-name -digest DIGEST", "unknown argument"),
            ("-name ghcr.io/a -name b -digest DIGEST", "-name is given twice"),
            ("-name ghcr.io/a -digest sha256:00", "is not a digest"),
            ("-name ../../etc -digest DIGEST", "is not an image reference"),
            ("-name corp/app:1 -digest DIGEST", "does not begin with a registry"),
            ("-name app:1 -digest DIGEST", "does not begin with a registry"),
            ("-name http://a/b -digest DIGEST", "is not an image reference"),
            ("-name ghcr.io/a -digest DIGEST --help", "unknown argument"),
            (
                "-name ghcr.io/a -digest DIGEST -stdin-media-type text/html",
                "unknown -stdin-media-type",
            ),
            ("-name ghcr.io/a -digest DIGEST x", "unknown argument \"x\""),
            (
                "-name ghcr.io/a@sha256:05b3abf2579a5eb66403cd78be557fd860633a1fe2103c7642030defe32c657f -digest DIGEST",
                "the name has the digest sha256:05b3",
            ),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expect), "{line}: {error}");
        }
    }

    #[test]
    fn descriptors() {
        let asked = parse("-name ghcr.io/a -digest DIGEST").unwrap();
        let check =
            |text: &str| asked.check_descriptor(text.as_bytes()).map_err(|it| it.to_string());
        assert_eq!(check(&format!("{{\"digest\":\"{DIGEST}\",\"size\":1}}")), Ok(()));
        let other = DIGEST.replace("e3b0", "0000");
        let error = check(&format!("{{\"digest\":\"{other}\"}}")).unwrap_err();
        assert!(error.contains("the descriptor has the digest sha256:0000"), "{error}");
        for bad in ["", "[]", "{}", "{\"digest\":1}", &"[".repeat(1000), &" ".repeat(1 << 17)] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
