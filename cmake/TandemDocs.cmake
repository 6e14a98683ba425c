# Target `docs`: the pages of docs/ and the public headers, a warning being an error. Needs Doxygen only
# when it is built.
find_program(TANDEM_DOXYGEN doxygen)
if(TANDEM_DOXYGEN)
  configure_file(docs/Doxyfile.in ${PROJECT_BINARY_DIR}/Doxyfile @ONLY)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/docs)
  add_custom_target(docs COMMAND ${TANDEM_DOXYGEN} ${PROJECT_BINARY_DIR}/Doxyfile VERBATIM
                    COMMENT "Documentation in ${PROJECT_BINARY_DIR}/docs/html")
  if(TANDEM_TESTS)
    add_test(NAME docs.build_without_warnings COMMAND ${TANDEM_DOXYGEN} ${PROJECT_BINARY_DIR}/Doxyfile)
  endif()
endif()
