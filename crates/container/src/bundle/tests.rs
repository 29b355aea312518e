use std::collections::BTreeMap;

use super::*;

fn options() -> BundleOptions {
    BundleOptions::new("h".to_owned())
}

fn image() -> ImageConfig {
    ImageConfig {
        env: vec!["A=1".to_owned(), "PATH=/bin".to_owned()],
        working_dir: "/work".to_owned(),
        entrypoint: vec!["entry".to_owned()],
        cmd: vec!["image".to_owned(), "command".to_owned()],
        ..ImageConfig::default()
    }
}

fn root_user() -> User {
    User { uid: 0, gid: 0, groups: vec![4], home: "/root".to_owned() }
}

fn check(
    change: impl FnOnce(&mut ImageConfig, &mut BundleOptions),
    expect: Result<&str, &BundleError>,
) {
    let (mut image, mut options) = (image(), options());
    change(&mut image, &mut options);
    let found = Process::new(&image, &options, &root_user());
    let found = found
        .map(|it| format!("{} | {} | {}", it.args.join(" "), it.env.join(" "), it.working_dir));
    assert_eq!(found.as_deref(), expect.as_deref().map_err(|it| *it));
}

#[test]
fn the_caller_overrides_the_image() {
    check(|_, _| {}, Ok("entry image command | A=1 PATH=/bin HOME=/root | /work"));
    check(
        |_, w| w.command = vec!["mine".to_owned()],
        Ok("entry mine | A=1 PATH=/bin HOME=/root | /work"),
    );
    check(
        |_, w| {
            w.entrypoint = Some(vec!["e".to_owned()]);
            w.env = vec!["A=2=3".to_owned(), "HOME=".to_owned()];
            w.working_dir = Some("/".to_owned());
        },
        Ok("e | A=2=3 PATH=/bin HOME= | /"),
    );
    check(
        |i, w| {
            i.env.clear();
            i.working_dir.clear();
            w.terminal = Terminal::New;
        },
        Ok(
            "entry image command | PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            HOME=/root TERM=xterm | /",
        ),
    );
    check(|_, w| w.entrypoint = Some(Vec::new()), Err(&BundleError::NoCommand));
    check(
        |i, _| i.env.extend(["=x".to_owned(), "B".to_owned()]),
        Ok("entry image command | A=1 PATH=/bin HOME=/root | /work"),
    );
    check(|_, w| w.env.push("=x".to_owned()), Err(&BundleError::Env("=x".to_owned())));
    check(|_, w| w.env.push("B".to_owned()), Err(&BundleError::Env("B".to_owned())));
}

#[test]
fn only_root_starts_with_capabilities() {
    let process = Process::new(&image(), &options(), &root_user()).unwrap();
    for (uid, expect) in [(0, 11), (1, 0)] {
        let user = User { uid, ..root_user() };
        let config = runtime_config(&process, &user, &options(), &image(), "rootfs");
        assert_eq!(config.process.capabilities.effective.len(), expect);
    }
}

#[test]
fn a_host_network_is_no_namespace_of_its_own() {
    let process = Process::new(&image(), &options(), &root_user()).unwrap();
    for (network, expect) in [(Network::None, true), (Network::Host, false)] {
        let options = BundleOptions { network, ..options() };
        let config = runtime_config(&process, &root_user(), &options, &image(), "rootfs");
        let network = SpecNamespace::new("network");
        assert_eq!(config.linux.namespaces.contains(&network), expect);
    }
}

#[test]
fn limits_that_no_controller_sets_are_dropped() {
    let limited = || BundleOptions {
        memory: NonZeroU64::new(1),
        pids: NonZeroU32::new(2),
        cpu: Cpu {
            quota: NonZeroU32::new(3),
            shares: NonZeroU64::new(4),
            cpus: Some("5".to_owned()),
        },
        ..options()
    };
    assert_eq!(limited().controllers(), Controller::ALL);
    for kept in Controller::ALL {
        let mut options = limited();
        options.drop_limits(&[kept]);
        assert_eq!(options.controllers(), [kept]);
        assert_eq!(options.cpu.quota.is_some(), options.cpu.shares.is_some());
    }
}

#[test]
fn an_image_gives_no_orders_to_the_runtime() {
    let process = Process::new(&image(), &options(), &root_user()).unwrap();
    let orders = [
        "run.oci.pidfd_receiver",
        "run.oci.keep_original_groups",
        "run.oci.seccomp_bpf_data",
        "run.oci.delegate-cgroup",
        "org.systemd.property.DefaultDependencies",
        "org.opencontainers.imagine",
        "io.kubernetes.cri.x",
        "",
    ];
    let mut labels: BTreeMap<_, _> =
        orders.map(|it| (it.to_owned(), "1".to_owned())).into_iter().collect();
    labels.insert("org.opencontainers.image.title".to_owned(), "t".to_owned());
    let image = ImageConfig { labels, ..image() };
    let config = runtime_config(&process, &root_user(), &options(), &image, "rootfs");
    let title = ("org.opencontainers.image.title".to_owned(), "t".to_owned());
    assert_eq!(config.annotations, [title].into());
}

/// Compares every byte, because another order of fields would be a different file for tools that compare bundles.
#[test]
fn a_bundle_with_everything() {
    let volumes = ["/host:/a:ro", "/shm:/dev/shm"].map(|it| it.parse().unwrap());
    let memory = Volume {
        source: mounts::MountSource::Memory {
            bytes: NonZeroU64::new(4096),
            mode: 0o700,
            noexec: false,
        },
        destination: "/b".to_owned(),
        access: Access::Writable,
        chown: false,
        restrictions: mounts::Restrictions::default(),
    };
    let options = BundleOptions {
        env: vec!["B=\"2\"".to_owned()],
        terminal: Terminal::New,
        network: Network::Joined("/run/netns/n".to_owned()),
        access: Access::ReadOnly,
        volumes: volumes.into_iter().chain([memory]).collect(),
        map: Some("0:100000:1000,1000:7:1\n0:200000:65536\n".parse().unwrap()),
        cgroup: Some("/quire-h-1".to_owned()),
        memory: NonZeroU64::new(1 << 20),
        pids: NonZeroU32::new(8),
        cpu: Cpu {
            quota: NonZeroU32::new(50_000),
            shares: NonZeroU64::new(512),
            cpus: Some("0-1".to_owned()),
        },
        security: Security {
            filter: security::Filter::Unconfined,
            apparmor: security::AppArmor::Usual,
            no_new_privileges: true,
            limits: vec!["nofile=1:2".parse().unwrap(), "core=0:-1".parse().unwrap()],
            ..Security::default()
        },
        ..options()
    };
    let title = ("org.opencontainers.image.title".to_owned(), "t".to_owned());
    let image = ImageConfig { labels: [title].into(), ..image() };
    let process = Process::new(&image, &options, &root_user()).unwrap();
    let config = runtime_config(&process, &root_user(), &options, &image, "rootfs");
    let text = serde_json::to_string_pretty(&config).unwrap() + "\n";
    assert_eq!(text, include_str!("everything.json"));
}

/// Empty files take memory of the kernel that `size=` does not limit.
#[test]
fn file_systems_in_memory_limit_the_number_of_files() {
    let mounts = mounts(&options());
    let in_memory: Vec<_> =
        mounts.iter().filter(|it| it.kind.as_deref() == Some("tmpfs")).collect();
    let named: Vec<_> = in_memory.iter().map(|it| it.destination.as_str()).collect();
    assert_eq!(named, ["/dev", "/dev/shm"]);
    for mount in in_memory {
        let options = mount.options.iter();
        assert_eq!(options.filter(|it| *it == "nr_inodes=65536").count(), 1, "{mount:?}");
    }
}
