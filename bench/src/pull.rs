//! Pull of an image from a registry on loopback into an empty store, ready to be mounted.

use anyhow::Result;

use super::command::{cmd, more};
use super::import::race;
use super::measure::Contestant;
use super::podman::{self, podman};
use super::registry;
use super::report::Report;
use crate::{Context, version};
use rig::inputs;
use rig::process::find_program;

/// $1 the folder, then the layers. Unpacks all layers at once, as a simple script can.
const GUNZIP: &str = r#"
mkdir "$1" && cd "$1" && shift && for blob; do gunzip -c "$blob" > "$(basename "$blob")" & done; wait
"#;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let registry = registry::start(context)?;
    let image = &format!("{}/postgres:1", registry.host);
    registry::copy(layout, image)?;
    let ours = || cmd!("{quire} --store {work}/store pull {image}");
    let umoci = find_program("skopeo").zip(find_program("umoci")).map(|(skopeo, umoci)| {
        let commands = move || {
            let copied = format!("{}:latest", work.join("copied").display());
            [
                cmd!("{skopeo} copy --quiet --src-tls-verify=false docker://{image} oci:{copied}"),
                cmd!("{umoci} unpack --image {copied} {work}/umoci"),
            ]
        };
        let (skopeo, umoci) = (version("skopeo"), version("umoci"));
        let name = format!("skopeo copy ({skopeo}), umoci unpack ({umoci})");
        Contestant::new(name, commands).before(|| {
            context.set_aside("copied")?;
            context.set_aside("umoci")
        })
    });
    let podman = find_program("podman").map(|_| {
        let pull = || {
            let podman = podman(context, layout)?;
            anyhow::Ok(more!(podman, "pull --quiet --tls-verify=false {image}"))
        };
        Contestant::new(format!("podman pull ({})", version("podman")), pull)
            .before(|| podman::set_aside(context))
    });
    let layers = registry::layers(layout)?;
    let gunzip = || cmd!("sh -ec {GUNZIP} sh {work}/tars", ..&layers);
    let gunzip = Contestant::new("gunzip of the layers to two files", gunzip);
    let rows = [
        ("", Some(Contestant::new("quire pull", ours).before(|| context.set_aside("store")))),
        ("skopeo or umoci", umoci),
        ("podman", podman),
        ("", Some(gunzip.before(|| context.set_aside("tars")))),
    ];
    let (table, findings) =
        race(context, "debian-postgres", rows, &["skopeo", "podman", "gunzip"])?;
    Ok(Report {
        name: "pull",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers of 237 MB, from Debian's docker-registry on loopback into an empty \
             store. The registry's own work is on everybody's clock, as is a `syncfs` of the file system; its processes \
             are in nobody's time of processors. The last row has no network, no files and no checks: what inflating alone \
             takes.",
        ),
        tables: vec![table],
        findings,
        ..Report::default()
    })
}
