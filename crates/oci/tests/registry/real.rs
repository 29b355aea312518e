//! Against the registry that everybody knows, where it is installed.

use std::io::Write as _;

use quire_oci::registry::Credential;
use quire_oci::registry::{Keyring, Secret};

use super::daemon::{Daemon, PROGRAM};
use super::*;

const OCI: &str = "application/vnd.oci.image.manifest.v1+json";

/// A registry, or a word about why there is none.
pub(crate) fn start(settings: &str) -> Option<Daemon> {
    let daemon = Daemon::start(&std::env::temp_dir(), settings).unwrap();
    if daemon.is_none() {
        println!("SKIPPED: {PROGRAM} is not installed");
    }
    daemon
}

fn round_trip(host: &str, settings: &Settings) {
    let there = registry(host, settings);
    assert!(there.manifest("1").unwrap_err().is_not_found());
    let (config, layer) = (b"{}".to_vec(), noise((16 << 20) + 12_345));
    for blob in [&config, &layer] {
        assert!(!there.has_blob(&digest(blob)).unwrap());
        there.upload_blob(&digest(blob), blob.len() as u64, &mut &blob[..]).unwrap();
        assert!(there.has_blob(&digest(blob)).unwrap());
    }
    let manifest = format!(
        "{{\"schemaVersion\":2,\"mediaType\":\"{OCI}\",\"config\":{{\"mediaType\":\"application/vnd.oci.image.config.v1+json\",\
         \"digest\":\"{}\",\"size\":{}}},\"layers\":[{{\"mediaType\":\"application/vnd.oci.image.layer.v1.tar\",\
         \"digest\":\"{}\",\"size\":{}}}]}}",
        digest(&config),
        config.len(),
        digest(&layer),
        layer.len()
    );
    let stored = there.put_manifest("1", OCI, manifest.as_bytes()).unwrap();
    for name in ["1".to_owned(), stored.digest.to_string()] {
        let fetched = there.manifest(&name).unwrap();
        assert_eq!((fetched.digest, fetched.media_type.as_str()), (stored.digest, OCI));
        assert_eq!(fetched.bytes, manifest.as_bytes());
    }
    assert_eq!(there.tags().unwrap(), ["1"]);
    let size = layer.len() as u64;
    assert_same(&read(there.blob(&digest(&layer), Some(size), 0)).unwrap(), &layer);
    assert_same(&read(there.blob(&digest(&layer), None, 5_000_000)).unwrap(), &layer[5_000_000..]);
    assert_same(&read(there.blob(&digest(&layer), None, size)).unwrap(), &[]);
    let parts =
        there.ranges(&digest(&layer), &[1000..2000, 0..10, 16_777_000..16_778_000]).unwrap();
    assert_same(&parts[0], &layer[1000..2000]);
    assert_same(&parts[1], &layer[..10]);
    assert_same(&parts[2], &layer[16_777_000..16_778_000]);
    assert!(there.referrers(&stored.digest, None).unwrap().is_empty());
    let reference: Reference = format!("{host}/other/name").parse().unwrap();
    let other = Registry::new(&reference, settings).unwrap();
    assert!(other.mount_blob(&digest(&layer), "app").unwrap());
    assert!(!other.mount_blob(&digest(b"nothing"), "app").unwrap());
    assert!(other.has_blob(&digest(&layer)).unwrap());
    // The registry compares digests too, so that ours must be the same as its.
    let text = chain(&other.put_manifest("1", OCI, manifest.as_bytes()).unwrap_err());
    assert!(text.contains("unknown"), "the config is not there: {text}");
    std::io::stdout().flush().unwrap();
}

#[test]
fn docker_registry() {
    let Some(daemon) = start("") else { return };
    round_trip(&daemon.host, &settings());
}

#[test]
fn docker_registry_with_a_password() {
    // The password is open-sesame, hashed by crypt(3).
    let folder = tempfile::tempdir().unwrap();
    let users = folder.path().join("htpasswd");
    std::fs::write(&users, "me:$2b$05$TYQndf3peGt.JQzdiNw8PuMddQE2xVcVXBHEcGw2DoSuW3noVNBl2\n")
        .unwrap();
    let auth = format!("auth: {{htpasswd: {{realm: x, path: \"{}\"}}}}\n", users.display());
    let Some(daemon) = start(&auth) else { return };
    let with = |password: &str| {
        let password = Secret::new(password.to_owned());
        let given = Some(Credential::Password { user: "me".to_owned(), password });
        Settings { keyring: Keyring { given, ..settings().keyring }, ..settings() }
    };
    let text = chain(&registry(&daemon.host, &settings()).tags().unwrap_err());
    assert!(text.contains("no credentials for 127.0.0.1:"), "{text}");
    let text = chain(&registry(&daemon.host, &with("wrong")).tags().unwrap_err());
    assert!(text.contains("are refused"), "{text}");
    round_trip(&daemon.host, &with("open-sesame"));
}
