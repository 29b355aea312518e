//! Tests the search for an image by its layers.

use image::digest::Digest;
use oci::source::{Choice, ImageSource};
use quire_transfer::image_of_layers;
use quire_transfer::import::{ImportOptions, Report, import};
use store::Form;

use super::{Home, usual_wishes};
use crate::build::{Layout, Pack, Tar};

/// Imports an image of two layers with one file each.
fn import_as(home: &Home, name: &str, form: Form, files: [&str; 2]) -> Report {
    let directory = home.path(&format!("{form}-{}", files.concat()));
    let mut layout = Layout::new(&directory);
    let tars = files.map(|it| (Tar::default().file(it, it.as_bytes()).bytes(), Pack::Gzip));
    let (image, _) = layout.image(&tars);
    layout.add(image, None, None);
    let name = name.parse().unwrap();
    let options = ImportOptions { name: Some(&name), form, ..usual_wishes() };
    let source = ImageSource::Layout { directory: directory.clone(), choice: Choice::Only };
    import(&home.store, &source, &home.environment(), &options).unwrap()
}

fn layers(report: &Report) -> Vec<Digest> {
    report.layers.iter().map(|it| it.diff_id).collect()
}

#[test]
fn only_an_image_with_a_name_and_these_very_layers() {
    let home = Home::new();
    let found = |layers: &[Digest]| image_of_layers(&home.store, layers);
    let one = import_as(&home, "one", Form::Objects, ["a", "b"]);
    let _other = import_as(&home, "other", Form::Objects, ["a", "c"]);
    let both = layers(&one);
    assert_eq!(found(&both), Some(one.image));
    let turned: Vec<_> = both.iter().copied().rev().collect();
    for wrong in [&[][..], &both[..1], &turned, &[&both[..], &both[..1]].concat()] {
        assert_eq!(found(wrong), None, "{wrong:?}");
    }
    // An image without a name is not found, because `gc` may remove it.
    home.store.remove_ref(&"one".parse().unwrap()).unwrap();
    assert_eq!(found(&both), None);
    // Only images of the form `objects` are found, because engines need whole files.
    let tar = import_as(&home, "tar", Form::Tar, ["f", "g"]);
    assert_eq!(found(&layers(&tar)), None);
    let also = import_as(&home, "also", Form::Objects, ["f", "g"]);
    assert_eq!(found(&layers(&tar)), Some(also.image));
}
