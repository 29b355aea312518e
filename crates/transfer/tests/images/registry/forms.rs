//! Tests pulls into devices.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use image::verity::ImageId;
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::Registry;
use quire_transfer as transfer;
use store::Form;
use transfer::import::ImportOptions;
use transfer::pull::{Indexes, Layers, PullSettings, Pulled, Syncs, default_name, pull};

use super::pulls::{ailing, image, layer, served};
use super::settings;
use crate::home::{Home, usual_wishes};
use testing::fake::reply;

fn pull_into(home: &Home, host: &str, form: Form) -> Result<Pulled, transfer::pull::PullError> {
    let reference: Reference = format!("{host}/app:1").parse().unwrap();
    let name = default_name(&reference).unwrap();
    let import = ImportOptions { name: Some(&name), form, ..usual_wishes() };
    let policies = Policies::load(&[]).unwrap();
    let options = PullSettings {
        import,
        layers: Layers::Forget,
        indexes: Indexes::Forget,
        policies: &policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, &settings()).unwrap();
    pull(&home.store, &registry, &reference, &home.environment(), &options)
}

/// Returns the same image, which was converted from the form `objects`.
fn converted(home: &Home, id: &ImageId, form: Form) -> ImageId {
    let found = home.store.refs.all().unwrap();
    let (name, reference) = found.iter().find(|(_, it)| it.image == *id).unwrap();
    let manifest = reference.manifest.as_ref();
    let stored = transfer::import::Stored { image: id, manifest, name: None };
    let options = ImportOptions { name: Some(name), form, ..usual_wishes() };
    transfer::import::convert(&home.store, &stored, &home.environment(), &options).unwrap().image
}

#[test]
fn a_pull_into_devices_goes_on_where_it_stopped() {
    for form in [Form::Packed, Form::Tar] {
        let served = Arc::new(served(vec![layer("a", 1 << 20), layer("b", 5 << 20)]));
        let (server, is_mended) =
            ailing(&served, |request, true_one| match request.header("range") {
                None => true_one.cut(3 << 20),
                Some(_) => reply(500),
            });
        let home = Home::new();
        pull_into(&home, &server.host(), form).unwrap_err();
        server.settle();
        is_mended.store(true, Ordering::Relaxed);
        let before = server.seen().len();
        let pulled = image(pull_into(&home, &server.host(), form));
        let again = server.seen().split_off(before);
        for layer in 0..2 {
            let path = served.path(layer);
            let whole = again.iter().filter(|it| it.path == path && it.header("range").is_none());
            assert_eq!(whole.count(), 0, "layer {layer} as {form:?}: {again:?}");
        }
        assert!(home.is_sound());
        assert_eq!(home.blobs(), [".origins", ".signatures"], "no pin and no parts are left");
        assert!(matches!(
            pull_into(&home, &server.host(), form),
            Ok(Pulled::UpToDate { image, .. }) if image == pulled
        ));
        let other = Home::new();
        let objects = image(other.pull(&server.host()));
        assert_eq!(converted(&other, &objects, form), pulled, "{form:?}");
        // Converts in the same store, without downloading a layer.
        let before = server.lines().len();
        assert_eq!(image(pull_into(&home, &server.host(), Form::Objects)), objects);
        let again = server.lines().split_off(before);
        assert!(!again.iter().any(|it| it.contains(&served.path(0))), "{again:?}");
    }
}
