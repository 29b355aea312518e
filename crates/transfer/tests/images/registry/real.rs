//! Tests with real registries: Docker's registry, if it is installed, and the one in crane.

use std::io::Write as _;

use oci::registry::{Credential, Keyring, Secret};
use quire_transfer::export::How;
use quire_transfer::pull::Layers;
use quire_transfer::push::Sent;

use super::pulls::{image, layer, push_to, served};
use super::*;
use crate::home::Home;
use testing::crane;
use testing::daemon::{Daemon, PROGRAM};

const OCI: &str = "application/vnd.oci.image.manifest.v1+json";

/// Starts a registry, or reports why there is none.
pub(crate) fn start(settings: &str) -> Option<Daemon> {
    let daemon = Daemon::start(&std::env::temp_dir(), settings).unwrap();
    if daemon.is_none() {
        testing::skipped(&format!("{PROGRAM} is not installed"));
    }
    daemon
}

/// Starts `crane registry serve`, or reports why there is none. It keeps all data in memory, and the blobs of all
/// repositories together. It has no ranges, mounts or referrers, does not report the progress of uploads, and accepts
/// manifests whose blobs it lacks.
pub(crate) fn start_crane() -> Option<Daemon> {
    let program = crane()?;
    let daemon = Daemon::serve(&std::env::temp_dir(), |_, address| {
        let mut command = std::process::Command::new(&program);
        command.args(["registry", "serve"]).env("PORT", address.port().to_string());
        Ok(command)
    });
    daemon.unwrap()
}

/// Selects the features that only one of the registries has.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Docker,
    Crane,
}

fn round_trip(kind: Kind, host: &str, settings: &Settings) {
    let there = registry(host, settings);
    assert!(there.manifest("1").unwrap_err().is_not_found());
    let (config, layer) = (b"{}".to_vec(), noise((16 << 20) + 12_345));
    for blob in [&config, &layer] {
        assert!(!there.has_blob(&digest(blob), None).unwrap());
        there.upload_blob(&digest(blob), blob.len() as u64, &mut &blob[..]).unwrap();
        assert!(there.has_blob(&digest(blob), None).unwrap());
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
    assert_eq!(other.mount_blob(&digest(&layer), "app").unwrap(), kind == Kind::Docker);
    assert!(!other.mount_blob(&digest(b"nothing"), "app").unwrap());
    assert!(other.has_blob(&digest(&layer), None).unwrap());
    if kind == Kind::Docker {
        let text = chain(&other.put_manifest("1", OCI, manifest.as_bytes()).unwrap_err());
        assert!(text.contains("unknown"), "the config is not there: {text}");
    }
    std::io::stdout().flush().unwrap();
}

#[test]
fn docker_registry() {
    let Some(daemon) = start("") else { return };
    round_trip(Kind::Docker, &daemon.host, &settings());
}

#[test]
fn crane_registry() {
    let Some(daemon) = start_crane() else { return };
    round_trip(Kind::Crane, &daemon.host, &settings());
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
    assert!(text.contains("refuses the credentials"), "{text}");
    round_trip(Kind::Docker, &daemon.host, &with("open-sesame"));
}

/// Pulls an image from `one`, with its blobs and without, and pushes it to `one` and `other`.
fn whole_images(one: &Daemon, other: &Daemon) {
    // The first layer is sent in two chunks.
    let served = served(vec![layer("a", 17 << 20), layer("b", 10_000)]);
    served.put(&one.host);
    let (keeper, forgetful) = (Home::new(), Home::new());
    let expected = keeper.imported(&served);
    assert_eq!(image(keeper.pull_as(&one.host, Layers::Keep)), expected);
    assert_eq!(image(forgetful.pull(&one.host)), expected);

    let from = format!("{}/app:1", one.host);
    let manifest = digest(&served.manifest);
    let not = [(How::There, Sent::Not); 2];
    for home in [&keeper, &forgetful] {
        let pushed = push_to(home, &from, &format!("{}/app:again", one.host));
        assert_eq!(
            (pushed.digest, pushed.is_unchanged, &pushed.layers[..]),
            (manifest, true, &not[..])
        );
    }
    let to = format!("{}/team/app:1", other.host);
    let pushed = push_to(&keeper, &from, &to);
    let size = |at: usize| Sent::Bytes(served.layers[at].blob.len() as u64);
    let sent = [(How::Kept, size(0)), (How::Kept, size(1))];
    assert_eq!(
        (pushed.digest, pushed.is_unchanged, &pushed.layers[..]),
        (manifest, true, &sent[..])
    );
    assert_eq!(push_to(&keeper, &from, &to).layers, not);

    // Compressing again gives another manifest of the same files. Whether this is needed depends on the blobs in the
    // registry.
    let pushed = push_to(&forgetful, &from, &format!("{}/app:1", other.host));
    assert_eq!(pushed.is_unchanged, pushed.layers == not, "{pushed:?}");
    assert_eq!(image(Home::new().pull(&other.host)), expected);
}

#[test]
fn whole_images_at_docker_registry() {
    let (Some(one), Some(other)) = (start(""), start("")) else { return };
    whole_images(&one, &other);
}

#[test]
fn whole_images_at_crane() {
    let (Some(one), Some(other)) = (start_crane(), start_crane()) else { return };
    whole_images(&one, &other);
}
