//! Lazy images whose name, service or registry disappears while they are used.

use std::process::Stdio;

use super::lazy::{Stage, names};
use crate::services::served::{end, serve, serve_with};

const FILE: &str = "root/file-7";

fn expected() -> String {
    "7 ".repeat(99)
}

#[test]
fn an_image_that_lost_its_name_is_filled_by_the_next_service() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    // The log is a separate file, because the keeper inherits the service's open files and lives longer than the
    // service.
    let log = std::fs::File::create(to.path("log")).unwrap();
    let mut first = serve_with(&to, &[], |it| it.stderr(Stdio::from(log)));
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    to.out("rmi app");
    let mut second = serve_with(&to, &["--replace"], |it| it);
    assert!(first.wait().unwrap().success());
    let told = std::fs::read_to_string(to.path("log")).unwrap();
    // The other service has taken over the devices.
    assert!(!told.contains("in use"), "{told}");
    assert_eq!(std::fs::read_to_string(to.path(FILE)).unwrap(), expected());
    to.out("umount root");
    end(&to, &mut second);
}

#[test]
fn an_image_that_was_pulled_as_a_whole_needs_no_registry() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy --prefetch none app root");
    // The image is not damaged: its data is not downloaded.
    let lazy = to.run("verify app");
    assert!(lazy.code == Some(1) && lazy.out.contains("it is not damaged"), "{lazy:?}");
    assert!(!lazy.out.contains("is damaged") && !lazy.out.contains("--repair"), "{lazy:?}");
    to.out(&format!("pull --quiet --form tar {} whole", stage.target));
    assert_eq!(names(&to, "data").iter().filter(|it| !it.contains('.')).count(), 1);
    drop(stage.daemon);
    assert_eq!(std::fs::read_to_string(to.path(FILE)).unwrap(), expected());
    to.out("umount root");
    end(&to, &mut service);
}

#[test]
fn credentials_that_nobody_uses_are_told() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let missing = to.run(&format!("pull --lazy --authfile missing.json {} app", stage.target));
    assert!(missing.code == Some(2) && missing.err.contains("missing.json"), "{}", missing.err);
    let mut service = serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::fs::create_dir(to.path("root")).unwrap();
    std::fs::write(to.path("auth.json"), "{}").unwrap();
    let told = to.run("mount --lazy --authfile auth.json app root");
    assert_eq!(told.code, Some(0), "{}", told.err);
    let auth = format!("--replace --authfile {}", to.path("auth.json").display());
    assert!(told.err.contains(&auth), "{}", told.err);
    to.out("umount root");
    end(&to, &mut service);
}

/// Root must not use files that another user can change, so starting a service would be useless.
#[test]
fn no_service_starts_on_a_store_of_another() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    std::os::unix::fs::chown(to.path("store"), Some(65534), Some(65534)).unwrap();
    std::fs::create_dir(to.path("root")).unwrap();
    for line in ["serve --lazy", "mount --lazy app root"] {
        let refused = to.run(line);
        assert!(
            refused.code == Some(2) && refused.err.contains("65534"),
            "{line}: {}",
            refused.err
        );
    }
    assert!(to.run("ps --lazy").code == Some(0));
    assert!(!to.run("ps --lazy").err.contains("started"), "no service runs");
}
