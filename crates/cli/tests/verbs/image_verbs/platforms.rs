//! Images for other machines than this one.

use std::process::Command;

use crate::{Place, write};

/// Makes two layouts with one image each and no index of platforms: `here` for this machine, `other` for a machine
/// on which tests never run.
fn place() -> Place {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let mut command = Command::new("tar");
    command.arg("-cf").arg(place.path("a.tar")).arg("-C").arg(&tree);
    assert!(command.arg(".").status().unwrap().success());
    place.out("import --quiet tar:a.tar here:1");
    place.out("import --quiet --platform linux/mips tar:a.tar other:1");
    for name in ["here", "other"] {
        place.out(&format!("export --quiet {name}:1 oci:{name}"));
        place.out(&format!("export --quiet {name}:1 docker-archive:{name}.tar"));
        place.out(&format!("rmi {name}:1"));
    }
    place
}

#[test]
fn an_image_of_another_platform_is_never_taken_silently() {
    let place = place();
    for (other, here) in
        [("oci:other", "oci:here"), ("docker-archive:other.tar", "docker-archive:here.tar")]
    {
        let taken = place.run(&format!("import {other} a:1"));
        assert_eq!(taken.code, Some(0), "{}", taken.err);
        assert!(
            taken.err.contains("the image is for linux/mips, but this machine is linux/"),
            "{}",
            taken.err
        );
        place.out("rmi a:1");
        let refused = place.run(&format!("import --platform linux/s390x {other} a:1"));
        assert_eq!(refused.code, Some(2), "{}", refused.err);
        assert!(
            refused.err.contains("the image is for linux/mips, not for linux/s390x"),
            "{}",
            refused.err
        );
        assert!(refused.err.contains("without --platform"), "{}", refused.err);
        assert_eq!(place.run("show a:1").code, Some(3), "it was imported");
        // If a platform is requested, or the image is for this machine, no remark is printed.
        for line in
            [format!("import --platform linux/mips {other} a:1"), format!("import {here} b:1")]
        {
            let taken = place.run(&line);
            assert_eq!(taken.code, Some(0), "{}", taken.err);
            assert!(!taken.err.contains("this machine is"), "{}", taken.err);
        }
    }
}

#[cfg(feature = "registry")]
#[test]
fn a_pull_compares_platforms_too() {
    let from = place();
    let Some(daemon) = crate::registry_verbs::registries::start(&from) else { return };
    from.out("import --quiet --platform linux/mips oci:other other:1");
    let name = format!("{}/other:1", daemon.host);
    from.out(&format!("push --quiet other:1 {name}"));
    let to = Place::new();
    let refused = to.run(&format!("pull --platform linux/s390x {name}"));
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(
        refused.err.contains("the image is for linux/mips, not for linux/s390x"),
        "{}",
        refused.err
    );
    assert_eq!(to.out("images --json").trim(), "[]", "nothing was pulled");
    // Pull twice: the second time, the image is stored already.
    for _ in 0..2 {
        let taken = to.run(&format!("pull {name}"));
        assert_eq!(taken.code, Some(0), "{}", taken.err);
        assert!(
            taken.err.contains("the image is for linux/mips, but this machine is"),
            "{}",
            taken.err
        );
    }
    let events = to.out(&format!("pull --json {name}"));
    assert!(events.contains(r#""image":"linux/mips""#), "{events}");
    let quiet = to.run(&format!("pull --quiet {name}"));
    assert_eq!((quiet.code, quiet.err.as_str()), (Some(0), ""));
}

#[test]
fn a_program_of_another_machine_is_named() {
    let Some(place) = crate::container_life::runs::place() else { return };
    let own = std::fs::read("/bin/true").unwrap();
    let mut foreign = own.clone();
    // This is EM_S390, in an ELF file of the other byte order. Source: `linux/elf-em.h`.
    foreign[5] = 2;
    foreign[18..20].copy_from_slice(&[0, 22]);
    write(&place.path("tree/foreign"), &foreign, 0o755);
    place.out("import --quiet dir:tree b");
    for runtime in crate::container_life::runs::runtimes() {
        let ran = place.run(&format!("run --runtime {runtime} b /foreign"));
        assert_eq!(ran.code, Some(126), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("a program for s390x"), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("exec format error"), "{runtime}: {}", ran.err);
        // A detached container gives the same error, and leaves no files behind.
        let ran = place.run(&format!("run -d --name gone --runtime {runtime} b /foreign"));
        assert_eq!((ran.code, ran.out.as_str()), (Some(126), ""), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("a program for s390x"), "{runtime}: {}", ran.err);
        for (program, code) in [("/etc/garbage", 126), ("/etc/lost", 127)] {
            let ran = place.run(&format!("run -d --name gone --runtime {runtime} b {program}"));
            assert_eq!((ran.code, ran.out.as_str()), (Some(code), ""), "{runtime}: {}", ran.err);
        }
        assert_eq!(place.out("ps -aq"), "");
    }
}
