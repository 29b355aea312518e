# No unit of ours has failed, and none of the system's because of us.
systemctl list-units --failed --all --no-legend
if test -n "$(systemctl list-units --failed --all --no-legend)"; then
    journalctl --no-pager --unit='quire*' | tail -50
    exit 1
fi
