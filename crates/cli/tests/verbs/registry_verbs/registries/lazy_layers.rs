//! Lazy pulls of images with many layers.

use super::lazy::{Stage, check_chain};
use super::start;
use crate::Place;
use crate::registry_verbs::lazy::layout;

/// Each layer has an index, and all of them are in the same blob.
#[test]
fn a_lazy_pull_of_many_layers_waits_for_two_answers() {
    let from = Place::new();
    let Some(daemon) = start(&from) else { return };
    let names: Vec<_> = (0..42).map(|it| format!("layer-{it}")).collect();
    let layers: Vec<_> = names.iter().map(|it| (it.as_str(), 20_000, "gzip")).collect();
    layout(&from, "layout", &layers);
    let target = format!("{}/team/app:1", daemon.host);
    from.out("import --quiet oci:layout many");
    from.out(&format!("push --quiet many {target}"));
    from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
    from.out(&format!("index --quiet --push {target} {target}"));
    let stage = Stage { from, daemon, target, manifest: String::new() };
    check_chain(&stage, ":1", |lines| {
        assert_eq!(lines.len(), 4, "{lines:?}");
        2
    });
}
