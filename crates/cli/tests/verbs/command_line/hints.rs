//! Follows the hints of errors: the printed commands are run as they are printed, and then the failed command must
//! succeed. Another test of the program checks that all printed commands have existing verbs and options.

use std::fs;
use std::process::Command;

use crate::container_life::containers::Rm;
use crate::mounting::mounts::Unmount;
use crate::{Place, add_programs, is_root, program};

/// Runs the commands in backticks of a message, with `values` for words in capitals. Returns their number.
fn follow(place: &Place, message: &str, values: &[(&str, &str)]) -> usize {
    let spans = message.split('`').skip(1).step_by(2);
    let mut count = 0;
    for span in spans {
        let mut line = span.to_owned();
        for (word, value) in values {
            line = line.replace(word, value);
        }
        match line.strip_prefix("quire ") {
            Some(line) => drop(place.out(line)),
            None => {
                let words: Vec<_> = line.split(' ').collect();
                let mut command = Command::new(words[0]);
                let done = command.args(&words[1..]).current_dir(place.folder.path()).status();
                assert!(done.unwrap().success(), "{line}");
            }
        }
        count += 1;
    }
    count
}

/// Runs a command that fails, follows its hints, and checks that `again` then succeeds.
fn check(place: &Place, line: &str, values: &[(&str, &str)], again: &str) {
    let failed = place.run(line);
    assert!(!matches!(failed.code, Some(0)), "{line}: {}", failed.out);
    assert!(follow(place, &failed.err, values) > 0, "{line}: {}", failed.err);
    let ran = place.run(again);
    assert_eq!(ran.code, Some(0), "{line}: {}; {again}: {}", failed.err, ran.err);
}

#[test]
fn images_without_layers_get_one() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree plain");
    let values = [("FILE", "a.tar"), ("NEW", "new")];
    check(&place, "export plain oci:out", &values, "export new oci:out");
    let values = [("FILE", "b.tar"), ("NEW", "other")];
    check(&place, "export plain docker-archive:a", &values, "export other docker-archive:a");
}

#[test]
fn images_are_put_into_the_form_that_a_trace_needs() {
    if !is_root() || program("crun").is_none() && program("runc").is_none() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    add_programs(&tree, &["/bin/true"]);
    place.out("import --form objects dir:tree plain");
    let failed = place.run("trace plain /bin/true");
    assert_eq!(failed.code, Some(125), "{}", failed.err);
    assert_eq!(follow(&place, &failed.err, &[("FILE", "a.tar"), ("NEW", "new")]), 2);
    place.out("convert --form objects new other");
    check(&place, "trace other /bin/true", &[], "show other");
    for name in ["new", "other"] {
        let refused = place.run(&format!("trace {name} /bin/true")).err;
        assert!(!refused.contains("the form"), "{refused}");
    }
}

/// All data of the image is in the EROFS image, so it has no form.
#[test]
fn an_image_without_devices_needs_no_index() {
    let place = Place::new();
    fs::create_dir(place.path("tree")).unwrap();
    fs::write(place.path("tree/short"), "short").unwrap();
    place.out("import dir:tree plain");
    place.out("export plain tar:a.tar");
    place.out("import --form tar tar:a.tar new");
    assert!(place.out("index new").contains("it needs none"));
}

#[cfg(feature = "registry")]
#[test]
fn an_index_is_made_by_the_pull_that_is_named() {
    let from = crate::registry_verbs::registries::place(1);
    let Some(daemon) = crate::registry_verbs::registries::start(&from) else { return };
    let target = format!("{}/app:1", daemon.host);
    from.out(&format!("push a:1 {target}"));
    for (form, name) in [("objects", "app"), ("packed", "app"), ("tar", "app:2")] {
        let to = Place::new();
        to.out(&format!("pull --form {form} {target} {name}"));
        check(&to, &format!("index {name}"), &[], &format!("index {name}"));
    }
    // An image without layers can have an index after it was pushed to a registry.
    let plain = Place::new();
    plain.tree("tree", &"0123456789".repeat(100));
    plain.out("import dir:tree plain");
    let failed = plain.run("index plain");
    assert_eq!(failed.code, Some(2), "{}", failed.err);
    let target = format!("{}/plain:1", daemon.host);
    let said = failed.err.replace("`quire push`", &format!("`quire push NEW {target}`"));
    assert_eq!(follow(&plain, &said, &[("FILE", "a.tar"), ("NEW", "new")]), 3, "{said}");
    plain.out(&format!("pull --form packed {target} pulled"));
    check(&plain, "index pulled", &[], "index pulled");
}

#[cfg(feature = "registry")]
#[test]
fn lost_data_is_pulled_by_the_command_that_is_named() {
    let from = crate::registry_verbs::registries::place(1);
    let Some(daemon) = crate::registry_verbs::registries::start(&from) else { return };
    let target = format!("{}/app:1", daemon.host);
    from.out(&format!("push a:1 {target}"));
    let to = Place::new();
    to.out(&format!("pull --form objects {target} app"));
    crate::image_verbs::heals::lose(&to);
    let repaired = to.run("fsck --repair --no-fetch");
    let said = repaired.err.lines().find(|it| it.contains("`quire pull")).unwrap_or_default();
    assert_eq!(follow(&to, said, &[]), 1, "{}", repaired.err);
    to.out("fsck");
    to.out("verify app");
}

#[test]
fn names_and_verbs_are_told_apart() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree plain");
    check(&place, "rm plain", &[], "images");
    assert_ne!(place.run("show plain").code, Some(0), "`rmi` removed the name");
    place.out("import dir:tree plain");
    for line in ["ls nothing", "rmi nothing"] {
        let failed = place.run(line);
        let said = failed.err.replace("`quire pull nothing`", "");
        assert!(follow(&place, &said, &[]) > 0, "{}", failed.err);
    }
    check(&place, "rm nothing", &[], "ps");
}

#[test]
fn an_erofs_image_is_imported() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree plain");
    place.out("export plain erofs:a.erofs");
    place.out("export --platform linux/amd64 plain disk:a.disk");
    for (file, source) in [("a.erofs", "erofs:a.erofs"), ("a.disk", "disk:a.disk")] {
        let ran = place.run(&format!("import {file}"));
        assert!(ran.err.contains(&format!("did you mean {source}?")), "{}", ran.err);
        place.out(&format!("import {source} again"));
        place.out("diff plain again");
    }
}

#[test]
fn a_mount_makes_way_for_another() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --form objects dir:tree one");
    fs::write(place.path("tree/etc/long"), "y".repeat(100)).unwrap();
    place.out("import --form objects dir:tree two");
    fs::create_dir(place.path("point")).unwrap();
    let guard = Unmount(place.path("point"));
    place.out("mount one point");
    check(&place, "mount two point", &[], "mount two point");
    let read = fs::read_to_string(place.path("point/etc/long"));
    place.out("umount point");
    assert_eq!(read.unwrap(), "y".repeat(100));
    drop(guard);
}

#[test]
fn a_container_is_stopped_and_removed() {
    if !is_root() || program("crun").is_none() && program("runc").is_none() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    add_programs(&tree, &["/bin/sleep"]);
    place.out("import --form objects dir:tree a");
    let _guard = Rm(&place, "c");
    place.out("run --quiet --detach --name c a -- /bin/sleep 100");
    check(&place, "rm c", &[], "rm c");
}
