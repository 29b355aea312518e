//! Origins of containers: the containers of whose snapshots they were made.

use std::collections::BTreeMap;

use container::life::lookup::KnownContainer;
use store::{ContainerSnapshotRecord, Store};

/// The records of a store's snapshots, by their ids.
#[derive(Debug, Default)]
pub(crate) struct Origins(BTreeMap<String, ContainerSnapshotRecord>);

impl Origins {
    /// Reads the records, if one of the containers is above a snapshot.
    pub(crate) fn read(store: &Store, containers: &[KnownContainer]) -> Self {
        if !containers.iter().any(|it| snapshot(it).is_some()) {
            return Self::default();
        }
        match store.container_snapshots.all() {
            Ok(all) => Self(all.into_iter().filter_map(|(id, it)| Some((id, it.ok()?))).collect()),
            Err(error) => {
                tracing::warn!(%error, "cannot read the records of snapshots");
                Self::default()
            }
        }
    }

    /// Returns the uppermost snapshot below a container that is of another container.
    pub(crate) fn of(&self, container: &KnownContainer) -> Option<&ContainerSnapshotRecord> {
        let mut next = snapshot(container);
        // A damaged chain may be endless.
        for _ in 0..=self.0.len() {
            let found = self.0.get(next?)?;
            if found.container != container.id {
                return Some(found);
            }
            next = found.below.as_deref();
        }
        None
    }

    /// Returns the place of each container's origin in `containers`, if it is the same container as at the time of the
    /// snapshot, and not a later one with its name.
    fn places(&self, containers: &[KnownContainer]) -> Vec<Option<usize>> {
        let names: BTreeMap<_, _> =
            containers.iter().enumerate().map(|(at, it)| (it.id.as_str(), at)).collect();
        let place = |container: &KnownContainer| {
            let snapshot = self.of(container)?;
            let at = *names.get(snapshot.container.as_str())?;
            let created = containers.get(at)?.record.as_ref()?.created;
            (created.0 <= snapshot.created.0).then_some(at)
        };
        containers.iter().map(place).collect()
    }

    /// Sorts containers so that each one follows its origin, and those of the same origin stay in their order. Returns
    /// them with lines that show the tree, as `pstree` does. A container whose origin `is_shown` refuses is below the
    /// next origin.
    pub(crate) fn tree(
        &self,
        containers: Vec<KnownContainer>,
        is_shown: impl Fn(&KnownContainer) -> bool,
    ) -> Vec<(String, KnownContainer)> {
        let shown: Vec<_> = containers.iter().map(is_shown).collect();
        let order = order(&self.places(&containers), &shown);
        let mut left: Vec<_> = containers.into_iter().map(Some).collect();
        let take = |(at, lines): (usize, String)| Some((lines, left.get_mut(at)?.take()?));
        order.into_iter().filter_map(take).collect()
    }
}

/// Id of the snapshot below a container's writable layer.
pub(crate) fn snapshot(container: &KnownContainer) -> Option<&str> {
    container.record.as_ref()?.snapshot.as_deref()
}

/// Returns the order of a tree's nodes that are shown, each with the lines before it. `above` has the node above each.
fn order(above: &[Option<usize>], shown: &[bool]) -> Vec<(usize, String)> {
    let is_shown = |at: usize| shown.get(at) == Some(&true);
    let mut parents: Vec<Option<usize>> = vec![None; above.len()];
    for (at, parent) in above.iter().enumerate() {
        // Two containers that were rolled back to a snapshot of the other have each other as their origin.
        let mut next = *parent;
        let mut steps = 0;
        while let Some(it) = next.filter(|it| *it != at && steps <= above.len()) {
            next = parents.get(it).copied().flatten();
            steps += 1;
        }
        if next.is_none()
            && let Some(place) = parents.get_mut(at)
        {
            *place = *parent;
        }
    }
    let visible = |at: usize| {
        let mut parent = parents.get(at).copied().flatten();
        while let Some(it) = parent.filter(|it| !is_shown(*it)) {
            parent = parents.get(it).copied().flatten();
        }
        parent
    };
    let mut below: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    for at in (0..above.len()).filter(|at| is_shown(*at)) {
        below.entry(visible(at)).or_default().push(at);
    }
    let mut order = Vec::new();
    // Nodes that are left, the next one last, with the lines before it and before those below it.
    let mut left: Vec<(usize, String, String)> = Vec::new();
    let roots = below.remove(&None).unwrap_or_default();
    left.extend(roots.into_iter().rev().map(|at| (at, String::new(), String::new())));
    while let Some((at, lines, inner)) = left.pop() {
        order.push((at, lines));
        let nodes = below.remove(&Some(at)).unwrap_or_default();
        let mut is_last = true;
        for node in nodes.into_iter().rev() {
            let [here, further] = if is_last { ["└─ ", "   "] } else { ["├─ ", "│  "] };
            left.push((node, format!("{inner}{here}"), format!("{inner}{further}")));
            is_last = false;
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::order;

    fn check(above: &[Option<usize>], hidden: &[usize], expect: &[&str]) {
        let shown: Vec<_> = (0..above.len()).map(|at| !hidden.contains(&at)).collect();
        let found = order(above, &shown);
        let found: Vec<_> = found.into_iter().map(|(at, lines)| format!("{lines}{at}")).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn forks_follow_their_origins() {
        check(&[], &[], &[]);
        check(&[None, None], &[], &["0", "1"]);
        let family = [None, Some(0), None, Some(1), Some(0), Some(1)];
        check(&family, &[], &["0", "├─ 1", "│  ├─ 3", "│  └─ 5", "└─ 4", "2"]);
        check(&family, &[1], &["0", "├─ 3", "├─ 4", "└─ 5", "2"]);
        check(&family, &[0], &["1", "├─ 3", "└─ 5", "2", "4"]);
        // An origin may be younger, because a container can be rolled back to another one's snapshot.
        check(&[Some(1), None], &[], &["1", "└─ 0"]);
    }

    #[test]
    fn a_circle_is_cut() {
        check(&[Some(0)], &[], &["0"]);
        check(&[Some(1), Some(0)], &[], &["1", "└─ 0"]);
        check(&[Some(1), Some(2), Some(0), Some(1)], &[], &["2", "└─ 1", "   ├─ 0", "   └─ 3"]);
        check(&[Some(1), Some(0)], &[1], &["0"]);
    }
}
