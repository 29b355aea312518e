//! The units for systemd.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::Place;

#[test]
fn the_units_are_ones_that_systemd_knows() {
    let analyze = "systemd-analyze";
    if !testing::programs(&[analyze]) {
        return;
    }
    let place = Place::new();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/systemd");
    let here = |unit: &str| {
        unit.replace("=/usr/bin/quire ", &format!("={} ", env!("CARGO_BIN_EXE_quire")))
    };
    let units = fs::read_dir(units).unwrap().map(|it| it.unwrap().path());
    let units: Vec<_> = units.map(|it| (it.clone(), fs::read_to_string(it).unwrap())).collect();
    // Write all units, because one names another.
    for (unit, text) in &units {
        fs::write(place.folder.path().join(unit.file_name().unwrap()), here(text)).unwrap();
    }
    for (unit, text) in units {
        let path = place.folder.path().join(unit.file_name().unwrap());
        let (name, unit, here) = (unit, text.clone(), here(&text));
        let starts_others = name.extension().is_some_and(|it| it == "socket" || it == "timer");
        assert_eq!(here == unit, starts_others, "{}", name.display());
        let verified = |text: &str| {
            fs::write(&path, text).unwrap();
            let mut command = Command::new(analyze);
            // The man pages need not be installed.
            let ran = command.args(["--man=no", "verify"]).arg(&path).output().unwrap();
            assert!(ran.status.success(), "{ran:?}");
            String::from_utf8(ran.stderr).unwrap()
        };
        assert_eq!(verified(&here), "");
        if starts_others {
            continue;
        }
        // systemd only warns about an unknown setting.
        assert!(verified(&here.replace("UMask", "UMaks")).contains("UMaks"));
        // The unit is restored, because another unit may name it.
        fs::write(&path, &here).unwrap();
        // Mounts must be visible to other processes. The exceptions are services that pass mounts as descriptors, or
        // make none.
        let own = ["quire-mounts", "quire-storage@", "quire-registry"];
        let has_own = name.file_stem().is_some_and(|it| own.iter().any(|name| it == *name));
        for word in ["PrivateMounts=y", "PrivateTmp=y", "ProtectSystem=", "MountFlags="] {
            assert!(has_own || !unit.lines().any(|it| it.starts_with(word)), "{word}");
        }
        // This setting blocks openat2, which is needed to remove folders of the store.
        assert!(!unit.lines().any(|it| it.starts_with("RestrictSUIDSGID=")));
        let mut commands =
            unit.lines().filter_map(|it| it.strip_prefix("ExecStart=/usr/bin/quire "));
        let command = commands.next_back().unwrap();
        if command.starts_with("gc ") {
            // `gc` has no settings and needs no store.
            assert_eq!(place.run(command).code, Some(0));
            continue;
        }
        let command = match command.strip_suffix(" $OPTIONS") {
            // The options in the comment, with an address for documentation (RFC 5737), which no host has.
            Some(command) => {
                let options = unit.lines().find_map(|it| it.strip_prefix("#   OPTIONS=")).unwrap();
                format!("{command} {}", options.replace("10.0.0.5", "192.0.2.1"))
            }
            // This service handles one client on standard input, and has no settings.
            None if command.ends_with(" --inetd") => command.to_owned(),
            None => format!("{command} --config none.toml"),
        };
        let ran = place.run(&command);
        assert!(ran.code == Some(2) && !ran.err.contains("Usage"), "{}", ran.err);
    }
}
