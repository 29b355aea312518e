//! Tests that the same content gives the same image from every kind of source. The kernel makes the trees, and GNU
//! tar makes the tars.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use super::{Home, usual_wishes};
use crate::build::{Age, Layout, Pack, Tar, docker_archive, pack};
use quire_transfer::import::ImportOptions;
use store::Form;
use testing::trees::{rich_tree, run};

fn tar(root: &Path, file: &Path, order: &str) -> bool {
    let file = file.to_str().unwrap();
    let arguments =
        ["--format=posix", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls", "-S"];
    let arguments = [&arguments[..], &[order, "-cf", file, "."]].concat();
    run("tar", &arguments, root)
}

#[test]
fn directory_tar_layout_archive_dump_and_image() {
    let home = Home::new();
    let root = home.path("root");
    rich_tree(&root);
    let [sorted, unsorted] = ["root.tar", "unsorted.tar"].map(|name| home.path(name));
    if !tar(&root, &sorted, "--sort=name") || !tar(&root, &unsorted, "--sort=none") {
        testing::skipped("the tar, layout and archive of a directory: no GNU tar");
        return;
    }
    let directory = home.import("dir", "root").unwrap().image;
    let mut images = vec![("dir:", directory)];
    images.push(("tar:", home.import("tar", "root.tar").unwrap().image));
    images.push(("tar: in another order", home.import("tar", "unsorted.tar").unwrap().image));

    let bytes = fs::read(&sorted).unwrap();
    for how in [Pack::Plain, Pack::Gzip, Pack::Zstd] {
        let path = home.path("layout");
        let mut layout = Layout::new(&path);
        let (image, _) = layout.image(&[(bytes.clone(), how)]);
        layout.add(image, None, None);
        // Uses a separate store, so that the source is read and not reused.
        let other = Home::new();
        let text = format!("oci:{}", path.display());
        let source = super::ImageSource::parse(text.as_ref()).unwrap();
        let report = quire_transfer::import::import(
            &other.store,
            &source,
            &other.environment(),
            &usual_wishes(),
        )
        .unwrap();
        assert!(!report.layers[0].is_reused);
        assert!(other.rebuilt(&report.layers[0].diff_id) == bytes);
        images.push(("oci:", report.image));
        // Imports again, from the recipe.
        let again = quire_transfer::import::import(
            &other.store,
            &source,
            &other.environment(),
            &usual_wishes(),
        )
        .unwrap();
        assert!(again.layers[0].is_reused);
        images.push(("a recipe", again.image));
    }
    let archive = docker_archive(&[bytes], &[], Age::Old);
    fs::write(home.path("a.tar"), pack(&archive, Pack::Gzip)).unwrap();
    let name = "some:name".parse().unwrap();
    let options = ImportOptions { name: Some(&name), ..usual_wishes() };
    images.push((
        "docker-archive:",
        home.import_with("docker-archive", "a.tar", &options).unwrap().image,
    ));

    let mut file = fs::File::create(home.path("root.dump")).unwrap();
    file.write_all(home.dump(&directory).as_bytes()).unwrap();
    images.push(("dump:", home.import("dump", "root.dump").unwrap().image));
    let mut hasher = image::verity::Hasher::new(image::verity::Algorithm::Sha256);
    let profile = image::erofs::Profile::Composefs(options.versions);
    image::erofs::write(&home.tree(&directory), &profile, &mut hasher).unwrap();
    images.push(("its image", hasher.finish().into()));

    let expect = home.dump(&directory);
    for (source, image) in images {
        if image != directory {
            for (left, right) in expect.lines().zip(home.dump(&image).lines()) {
                assert_eq!(left, right, "{source}");
            }
            panic!("{source} is {image}, not {directory}");
        }
    }
}

/// If a layer is split into two layers, the tree is the same, because replaced files are invisible.
#[test]
fn two_layers_and_one() {
    let home = Home::new();
    let root = home.path("root");
    rich_tree(&root);
    let whole = home.path("whole.tar");
    if !tar(&root, &whole, "--sort=name") {
        testing::skipped("a directory's tar in two layers: no GNU tar");
        return;
    }
    let first = home.path("first");
    fs::create_dir_all(first.join("usr/lib/gone/deep")).unwrap();
    fs::create_dir_all(first.join("pipe/was/a/directory")).unwrap();
    fs::write(first.join("usr/lib/65"), "another").unwrap();
    fs::write(first.join("usr/lib/gone/deep/x"), "gone").unwrap();
    let lower = home.path("lower.tar");
    assert!(tar(&first, &lower, "--sort=none"));
    fs::write(root.join("usr/lib/.wh.gone"), "").unwrap();
    assert!(run("touch", &["-d", "@1400000000.999999999", "usr/lib"], &root));
    let upper = home.path("upper.tar");
    assert!(tar(&root, &upper, "--sort=none"));
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let tars = [lower, upper].map(|tar| (fs::read(tar).unwrap(), Pack::Gzip));
    let (image, _) = layout.image(&tars);
    layout.add(image, None, None);
    let expect = home.import("tar", "whole.tar").unwrap().image;
    let layered = home.import("oci", "layout").unwrap();
    assert_eq!(home.dump(&layered.image), home.dump(&expect));
    assert_eq!(layered.image, expect);
    for (layer, (tar, _)) in layered.layers.iter().zip(&tars) {
        assert!(home.rebuilt(&layer.diff_id) == *tar);
    }
}

/// In the form `tar`, several layers may contain the same file. The file's location in the image must not depend on
/// the layers that were already in the store.
#[test]
fn layers_that_are_here_already_do_not_change_the_image_of_tars() {
    let [lib, app, other] = [3000, 5000, 70_000].map(testing::noise);
    let tars = [
        Tar::default().file("lib", &lib).file("again", &lib).bytes(),
        Tar::default().file("moved", &lib).file("app", &app).file("other", &other).bytes(),
        Tar::default().file("copy", &app).file("last", &lib).bytes(),
    ];
    let options = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let import = |home: &Home, name: &str, layers: &[usize]| {
        let path = home.path(name);
        let mut layout = Layout::new(&path);
        let layers: Vec<_> = layers.iter().map(|at| (tars[*at].clone(), Pack::Gzip)).collect();
        let (image, _) = layout.image(&layers);
        layout.add(image, None, None);
        home.import_with("oci", name, &options).unwrap()
    };
    let expect = import(&Home::new(), "whole", &[0, 1, 2]).image;
    for here in 1..8 {
        let before: Vec<_> = (0..3).filter(|at| here & 1 << at != 0).collect();
        let home = Home::new();
        import(&home, "before", &before);
        let report = import(&home, "whole", &[0, 1, 2]);
        let reused = report.layers.iter().map(|it| it.is_reused);
        let is_here = (0..3).map(|at| before.contains(&at));
        assert!(reused.eq(is_here), "{before:?}: {:?}", report.layers);
        assert_eq!(report.image, expect, "layers {before:?} were here");
    }
}
