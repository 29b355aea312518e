//! `--network NAME`, `--network-alias` and `--ip`: a container in networks of the store.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use container::networks::{JoinedNetworks, NetworkJoin, NetworkPlace, find_programs};
use kernel::mount::Propagation;
use kernel::process::{Namespace, Who};
use std::os::fd::AsFd as _;

use crate::args::NetworkKind;
use crate::session::context::Context;
use crate::session::own_namespace::{Written, enter_own_namespace, has_rights};
use crate::verbs::containers::networks::connect;
use crate::verbs::containers::run::args::NewContainer;

/// Folder of the place below the user's directory for the time of a session.
const PLACE: &str = "quire/networks";

/// Root's place, which the next boot removes.
const ROOTS: &str = "/run/quire/networks";

/// Returns the place of the networks of a user. `inside` is the user of this process, `outside` the user before it
/// entered a user namespace.
pub(crate) fn place(inside: Who, outside: Who) -> Option<NetworkPlace> {
    if outside.is_host_root() {
        return Some(NetworkPlace::new(PathBuf::from(ROOTS), inside));
    }
    // Source: XDG Base Directory Specification 0.8, which says that relative values must be ignored.
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|it| it.is_absolute());
    // Source: pam_systemd(8).
    let usual =
        || Some(Path::new("/run/user").join(outside.user.to_string())).filter(|it| it.is_dir());
    let folder = own.or_else(usual)?.join(PLACE);
    Some(NetworkPlace::new(folder, inside))
}

/// Disconnects containers whose monitor was killed.
pub(crate) fn sweep(context: &Context) {
    if let Some(place) = place(context.who(), context.outside()) {
        place.sweep();
    }
}

/// Returns the networks that a new container joins. `hostname` is the name of `--hostname`.
pub(crate) fn networks(
    context: &Context,
    args: &NewContainer,
) -> anyhow::Result<Option<JoinedNetworks>> {
    let wanted = &args.wanted.join;
    let Some(NetworkKind::Named(names)) = &args.wanted.network else {
        let given =
            [("--network-alias", !wanted.network_alias.is_empty()), ("--ip", wanted.ip.is_some())];
        if let Some((option, _)) = given.iter().find(|it| it.1) {
            bail!(
                "{option} needs a network of several containers: --network NAME (`quire network create NAME`)"
            );
        }
        return Ok(None);
    };
    if wanted.ip.is_some() && names.len() > 1 {
        bail!("--ip: which network has the address is unclear: name one network");
    }
    let place = place(context.who(), context.outside());
    if !args.published().is_empty() && !place.is_some_and(|it| it.can_publish()) {
        bail!(
            "--publish with --network {}: only root's networks can have published ports: use --network pasta for a \
            container with published ports, or run the client in the same network",
            names.join(",")
        );
    }
    let mut aliases = wanted.network_alias.clone();
    aliases.extend(args.wanted.names.hostname.clone().filter(|it| !aliases.contains(it)));
    let join = |name: &String| NetworkJoin { name: name.clone(), address: wanted.ip };
    Ok(Some(JoinedNetworks {
        networks: names.iter().map(join).collect(),
        aliases,
        ports: connect::ports(&args.published())?,
    }))
}

/// Moves this process into the user namespace of the user's networks, and starts the process that keeps them, if it
/// does not run. Returns whether this process has entered a namespace.
pub(crate) fn enter(who: Who, remark: &mut dyn FnMut(String)) -> anyhow::Result<bool> {
    if who.is_host_root() {
        return Ok(false);
    }
    find_programs()?;
    let pasta = connect::program()?;
    let place = place(who, who).ok_or(container::networks::NetworksError::NoPlace)?;
    let _lock = place.lock()?;
    place.hold()?;
    let is_root = has_rights(who);
    if let Some(keeper) = place.keeper() {
        if is_root {
            return Ok(false);
        }
        kernel::process::enter(keeper.as_fd(), &[Namespace::User])
            .context("cannot enter the user namespace of the networks")?;
        // The runtime may need to hide mounts from itself.
        kernel::process::own_mounts(Propagation::Private)?;
        return Ok(true);
    }
    let entered = !is_root && enter_own_namespace(who, Written::Stays, remark)?;
    place.start_keeper(&pasta)?;
    Ok(entered)
}
